"""The response cache: answers to requests that were answered before, without the model."""
