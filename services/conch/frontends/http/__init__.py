"""The REST front end: Triton's HTTP protocol over the core."""
