"""Traces: which requests have one, what is recorded, files and spans of it."""
