"""Servers with a console: one that allows everything on this machine, one with tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.console import Page
from tests.support.contract_server import REPEATER, REPEATER_CONFIG
from tests.support.servers import LocalServer, copy_example, free_port, serving, write_model, write_probe
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["grpc_is_warm", "open_server", "page", "repository"]

SCRIPT = "<img src=x onerror=alert(1)>"
"""A model named like a script."""

BROKEN = 'backend: "identity"\nmax_batch_size: 8\ninput { name: "A" data_tpye: TYPE_FP32 dims: [ 1 ] }\n'
SECRET_CONFIG = 'parameters { key: "api_token" value: { string_value: "hush" } }'


def write_models(repository: Path) -> None:
    """Models of every kind that the console treats differently."""
    copy_example(repository, "simple")
    write_probe(repository, extra=SECRET_CONFIG)
    write_probe(repository, SCRIPT)
    write_model(repository, "repeater", REPEATER_CONFIG, {"model.py": REPEATER})
    write_model(repository, "broken", BROKEN)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of both servers."""
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    return directory


@pytest.fixture(scope="module")
def open_server(repository: Path) -> Iterator[LocalServer]:
    """A server whose console allows everything on this machine."""
    flags = [
        f"--console-port={free_port()}",
        "--console-allow-control",
        "--console-allow-infer",
        "--exit-on-error=false",
        "--model-control-mode=explicit",
        "--load-model=*",
    ]
    log = logging.getLogger("conch")
    log.setLevel(logging.INFO)  # the log is the program's, here the test's
    with serving(repository, flags=flags) as server:
        yield server
    log.setLevel(logging.NOTSET)


@pytest.fixture
def page(open_server: LocalServer) -> Iterator[Page]:
    """Its page."""
    with Page(open_server.console_url) as page:
        yield page
