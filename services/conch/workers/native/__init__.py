"""Backends that are compiled for Triton: finding their libraries, loading their models in workers."""
