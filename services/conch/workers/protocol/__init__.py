"""Protocol of a worker's socket, for both ends: channel, codec, tensors, blocks; logs, GPUs, specs."""
