"""Front processes: they own clients' connections, and the server's process, the core, owns the models."""
