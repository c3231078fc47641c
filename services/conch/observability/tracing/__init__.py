"""Trace settings of the protocols; requests are not traced yet."""
