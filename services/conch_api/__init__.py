"""conch as a library: a server inside a program, functions as models, a client; see docs/python-api.md."""
