"""MLflow's side of conch: the deployment plug-in, and the flavor for models in Triton's layout."""

from __future__ import annotations

from mlflow_conch.triton_flavor import log_model, save_model

__all__ = ["log_model", "save_model"]
