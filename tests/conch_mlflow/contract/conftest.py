"""A registry that stands in for MLflow's server."""

from __future__ import annotations

from tests.support.mlflow_registry import place, registry

__all__ = ["place", "registry"]
