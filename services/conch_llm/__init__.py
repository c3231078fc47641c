"""Language models: OpenAI's routes over every model that can speak text.

A theory of operation is in ``docs/internals/llm.md``.
"""
