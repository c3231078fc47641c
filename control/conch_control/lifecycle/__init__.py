"""Loads, reloads and unloads models, and keeps the state of every model version."""
