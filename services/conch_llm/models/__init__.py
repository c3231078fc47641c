"""Runs Python models that have `chat`, `complete`, `embed`, `score` or `tokenize` instead of `execute`.

In the model's process, so it imports little: a worker may have another interpreter and no packages but numpy.
"""
