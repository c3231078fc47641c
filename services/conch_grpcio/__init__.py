"""The gRPC port on grpcio: an add-on, found by the entry point ``grpcio`` of ``conch.grpc_transports``."""
