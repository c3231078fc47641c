"""Shared by the engines of language models: GGUF files, and constraints of answers as requests name them."""
