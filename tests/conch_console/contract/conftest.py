"""Servers with a console: one that allows everything on this machine, one with tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.console import Page, open_console, write_models
from tests.support.contract_server import signal_files
from tests.support.servers import LocalServer
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["grpc_is_warm", "open_server", "page", "repository", "signal_files"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of both servers."""
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    return directory


@pytest.fixture(scope="module")
def open_server(repository: Path) -> Iterator[LocalServer]:
    """A server whose console allows everything on this machine."""
    with open_console(repository, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


@pytest.fixture
def page(open_server: LocalServer) -> Iterator[Page]:
    """Its page."""
    with Page(open_server.console_url) as page:
        yield page
