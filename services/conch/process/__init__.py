"""The server's process: memory allocator, GPUs, forks, signals, and the texts and diagnostics of a start."""
