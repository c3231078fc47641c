"""Checks model repositories without loading models; see docs/check.md."""
