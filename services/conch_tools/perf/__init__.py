"""`conch perf`: a load generator for Triton's protocols, its measuring and its reports."""
