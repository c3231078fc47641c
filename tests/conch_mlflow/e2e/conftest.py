"""Fixtures of the tests that start `conch` as a process."""

from __future__ import annotations

from tests.support.mlflow_registry import registry
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["grpc_is_warm", "registry"]
