"""Ensembles: models made of other models, tensors going from one to the next."""
