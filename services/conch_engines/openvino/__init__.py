"""The backend ``openvino``: IR, ONNX, TF-Lite, SavedModel and Paddle files on OpenVINO."""
