"""Serves language models with vLLM: configs are completed here, the engine runs in a worker."""
