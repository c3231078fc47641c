"""Runs PyTorch models: TorchScript, exported programs, AOTInductor packages and Python classes."""
