"""conch as a library: a server inside a program, functions as models, and a client; see docs/python-api.md."""
