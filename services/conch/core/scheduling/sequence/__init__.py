"""The sequence batcher: requests that belong together run in order, on one instance, in one place."""
