"""HTTP/2 (RFC 9113) without sockets and clocks: bytes in, events out, for both sides of a connection."""
