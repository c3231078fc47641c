"""Commands for the people around a server: traces, stacks, and first files of models and backends."""
