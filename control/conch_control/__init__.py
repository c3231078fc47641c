"""The control plane: reads model repositories, and loads and unloads models on the core."""
