"""The transports of the gRPC port, and tests that run on each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TRANSPORTS: dict[str, tuple[str, ...]] = {
    "own": ("--grpc-transport=own",),
    "grpcio": ("--grpc-transport=grpcio",),
}
"""The flags that choose each."""

EACH = ["own", pytest.param("grpcio", marks=pytest.mark.slow)]
"""Parameters of tests of what clients see: the quick set has conch's own transport only."""


class _Default:
    """The transport of servers that tests start, unless a flag names it."""

    name = "own"


def default_transport() -> str:
    """The transport of servers that a test starts now, unless a flag names it."""
    return _Default.name


@contextmanager
def _default(name: str) -> Iterator[str]:
    before, _Default.name = _Default.name, name
    try:
        yield name
    finally:
        _Default.name = before


@pytest.fixture(scope="module")
def grpc_transport() -> str:
    """The transport of servers that a test starts; a module with `each_transport` has one of its own."""
    return default_transport()


def each_transport() -> Any:
    """A fixture `grpc_transport`: the tests of a module that use it, or the shared server, run with each."""

    @pytest.fixture(scope="module", params=EACH)
    def grpc_transport(request: pytest.FixtureRequest) -> Iterator[str]:
        with _default(request.param) as name:
            yield name

    return grpc_transport
