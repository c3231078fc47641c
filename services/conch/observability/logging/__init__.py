"""Server log and access log: formatting on the logging thread, writing on one thread each."""
