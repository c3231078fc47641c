"""Loads a Python model's code and runs its instances."""
