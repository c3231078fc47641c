"""Fixtures of the tests that start `conch` as a process."""

from __future__ import annotations

from tests.support.e2e_fixtures import repository
from tests.support.libraries import libraries
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["grpc_is_warm", "libraries", "repository"]
