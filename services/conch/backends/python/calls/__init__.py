"""Requests of Python models to other models (BLS, business logic scripting)."""
