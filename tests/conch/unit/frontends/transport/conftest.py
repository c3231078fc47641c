"""Fixtures of the transports' tests."""

from __future__ import annotations

from tests.support.warm_grpc import grpc_is_warm

__all__ = ["grpc_is_warm"]
