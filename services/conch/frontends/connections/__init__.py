"""Sockets of clients on the I/O loop, for all protocols."""
