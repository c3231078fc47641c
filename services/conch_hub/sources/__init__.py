"""Places that models come from; each is a `Source`."""
