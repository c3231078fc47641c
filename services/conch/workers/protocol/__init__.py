"""What server and worker exchange: messages, tensors, memory blocks. Imported by both processes."""
