"""Backend ``tensorrt``: plans of TensorRT on NVIDIA GPUs."""
