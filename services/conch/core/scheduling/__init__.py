"""Schedulers: pure state machines that decide which requests run together, and when."""
