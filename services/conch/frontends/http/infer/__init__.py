"""Inference over REST: from an HTTP body to a request and from a response to an HTTP body."""
