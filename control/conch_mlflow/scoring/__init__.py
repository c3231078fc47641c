"""MLflow's scoring protocol beside the invocations of all models: signatures, examples and probes."""
