"""The gRPC front end: KServe v2 with Triton's extensions, on grpcio's C core."""
