"""HTTP/2 without input and output: bytes in, events out."""
