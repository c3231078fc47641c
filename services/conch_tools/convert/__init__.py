"""`conch convert`: reads a pickle in a process without rights, and writes a model that is served as it is."""
