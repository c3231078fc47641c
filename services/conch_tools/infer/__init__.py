"""Requests to models of a running server: values from people and files in, readable answers out."""
