"""Requests to models for OpenAI's routes, and what they answer."""
