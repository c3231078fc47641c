"""The gRPC front end: KServe v2 with Triton's extensions, on a transport of its own or on grpcio."""
