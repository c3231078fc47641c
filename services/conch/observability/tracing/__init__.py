"""Tracing of requests: sampling, recording, trace files."""
