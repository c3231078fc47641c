"""The protocol between server and worker: packets, records, tensors, memory blocks; imported by both."""
