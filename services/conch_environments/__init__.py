"""Environments of Python models: prepared ones, and those that are built of the packages a model lists."""
