"""Makes the fixture `server` of a test module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.servers import AnyServer, client_of, serving, serving_process

LOAD_ALL = ("--model-control-mode=explicit", "--load-model=*")
"""Flags that load all models, and let clients load and unload them."""


def server_fixture(
    *examples: Path,
    flags: Sequence[str] = (),
    process: bool = False,
    placed: bool = False,
    scope: Literal["function", "module"] = "module",
) -> Any:
    """A fixture `server`: a server with the models of the fixture `repository`.

    Args:
        examples: More repositories.
        flags: Flags of the command line.
        process: True for a process of its own.
        placed: True for the flag of the fixture `placement`, too.
        scope: Scope of the fixture.
    """

    def serve(repository: Path, *more: str) -> Iterator[AnyServer]:
        start = serving_process if process else serving
        with start(*examples, repository, flags=[*flags, *more]) as running:
            # gRPC keeps some file descriptors and threads from its first call on.
            with client_of(running) as client:
                assert client.is_server_ready()
            yield running

    def server(repository: Path, grpc_transport: str) -> Iterator[AnyServer]:
        yield from serve(repository)

    def placed_server(repository: Path, grpc_transport: str, placement: str) -> Iterator[AnyServer]:
        yield from serve(repository, placement)

    return pytest.fixture(scope=scope)(placed_server if placed else server)
