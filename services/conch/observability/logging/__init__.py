"""Server log and access log: formatting on the logging thread, writing on threads of their own."""
