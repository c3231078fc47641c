"""Backends that are compiled for Triton: libraries, found and read without running them."""
