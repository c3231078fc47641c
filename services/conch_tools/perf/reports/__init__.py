"""Reports of the results of the load generator."""
