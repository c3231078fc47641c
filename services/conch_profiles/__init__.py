"""Profiles of inputs: sketches of the columns of requests, compared with those of the training set."""
