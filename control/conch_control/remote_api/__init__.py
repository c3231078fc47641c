"""The ModelControl gRPC service on the control port, and its client."""
