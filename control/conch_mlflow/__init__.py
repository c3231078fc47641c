"""The registered models of an MLflow server as a model repository."""
