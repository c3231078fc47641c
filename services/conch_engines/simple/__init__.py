"""Triton's test backends: identity, repeat and square."""
