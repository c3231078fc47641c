"""Shadows: copies of requests for a candidate version, whose responses are compared with stable's."""
