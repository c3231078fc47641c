"""Logs, metrics and trace settings of the server."""
