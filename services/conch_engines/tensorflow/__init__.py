"""Runs TensorFlow's SavedModels and GraphDefs in workers, and TF-Lite models in process."""
