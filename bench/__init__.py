"""Benchmarks: scenes as data (scenes.toml) and one runner (run.py)."""
