"""Backends of conch: ONNX Runtime, OpenVINO, PyTorch, TensorFlow, TensorRT, trees and models for tests."""
