"""What both ends of a worker's socket share: channel, codec, tensors, blocks; logs, GPUs, specs."""
