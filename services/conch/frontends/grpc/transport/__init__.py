"""conch's own gRPC transport: gRPC's protocol over `http2`, on sockets of the `IoLoop`.

Source: PROTOCOL-HTTP2 of the gRPC project.
"""
