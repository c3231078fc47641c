"""Residency on demand: loads models for their first request, and evicts others to make room."""
