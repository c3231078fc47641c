"""Triton's generate extension: flat JSON in, flat JSON or server-sent events out."""
