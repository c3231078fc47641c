"""The scheduler core: requests, models, batching and instances; knows no socket and no framework."""
