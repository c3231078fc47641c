"""Runs in workers, in the environment of the model: imports neither conch nor the rest of this package.

The worker loads `vllm_model` by its path, with its siblings beside it, so they import each other relatively.
"""
