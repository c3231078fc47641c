"""Runs inside a worker process; imports only the standard library, numpy and parts of conch."""
