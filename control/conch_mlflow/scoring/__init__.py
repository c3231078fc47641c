"""MLflow's scoring protocol: its requests as tensors, and outputs as its predictions."""
