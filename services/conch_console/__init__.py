"""The web console: its HTTP handlers and the data behind its pages."""
