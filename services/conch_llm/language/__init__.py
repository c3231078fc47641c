"""The pure parts of language models in text form: templates, stops, tool calls, reasoning, tokens.

They import little, so that they also run in a worker with an environment of its own.
"""
