"""The sequence batcher: requests of a sequence run in order, on one instance."""
