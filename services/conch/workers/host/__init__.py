"""What runs in a worker process; only the standard library, numpy and the core are needed there."""
