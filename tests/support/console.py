"""Clients of the console: requests as its page sends them, and streams of events."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.support.contract_server import REPEATER, REPEATER_CONFIG
from tests.support.servers import (
    ROOT,
    WAIT_S,
    LocalServer,
    copy_example,
    free_port,
    serving,
    write_model,
    write_probe,
)

from conch.core.add_ons import server_packages

STATIC = ROOT / "services" / "conch_console" / "static"
_LEAST_NODE = (20, 19)  # which takes .js files with imports for modules


def node_problem() -> str:
    """Reason for which there is no usable node; empty if there is one."""
    node = shutil.which("node")
    if node is None:
        return "node is not installed"
    text = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(map(int, text.strip().removeprefix("v").split(".")[:2]))
    return "" if version >= _LEAST_NODE else f"node {text.strip()} is older than 20.19"


class Page:
    """Sends requests as the console's page does.

    Args:
        url: The console.
        headers: Headers besides the page's own.
    """

    def __init__(self, url: str, **headers: str) -> None:
        own = {"origin": url, "sec-fetch-site": "same-origin", "x-conch-console": "1"}
        self.url = url
        self.client = httpx.Client(base_url=url, headers={**own, **headers}, timeout=WAIT_S)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Reads."""
        return self.client.get(path, headers=headers)

    def post(self, path: str, content: Any = None, **headers: str) -> httpx.Response:
        """Sends JSON."""
        return self.client.post(path, json=content, headers=headers)

    def infer(self, model: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """Sends a request to a model; returns the events."""
        with self.client.stream("POST", f"/api/models/{model}/infer", json=body) as response:
            assert response.status_code == 200, response.read()
            return list(events_of(response))

    @contextmanager
    def live(self, query: str = "") -> Iterator[Iterator[tuple[str, Any]]]:
        """The live stream, until the end of the block."""
        with self.client.stream("GET", f"/api/live{query}") as response:
            assert response.status_code == 200, response.read()
            yield events_of(response)


def events_of(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """The server-sent events of a response, as they come."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


SCRIPT = "<img src=x onerror=alert(1)>"
"""A model named like a script; Python models may not be."""
NAMED = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
BROKEN = 'backend: "identity"\nmax_batch_size: 8\ninput { name: "A" data_tpye: TYPE_FP32 dims: [ 1 ] }\n'
SECRET_CONFIG = 'parameters { key: "api_token" value: { string_value: "hush" } }'


def write_models(repository: Path) -> None:
    """Models of every kind that the console treats differently."""
    copy_example(repository, "simple")
    write_probe(repository, extra=SECRET_CONFIG)
    write_model(repository, SCRIPT, NAMED)
    write_model(repository, "repeater", REPEATER_CONFIG, {"model.py": REPEATER})
    write_model(repository, "broken", BROKEN)


@contextmanager
def open_console(repository: Path, *flags: str) -> Iterator[LocalServer]:
    """A server whose console allows everything on this machine; all that it logs can be read there."""
    given = [
        f"--console-port={free_port()}",
        "--console-allow-control",
        "--console-allow-infer",
        "--exit-on-error=false",
        *flags,
    ]
    loggers = [logging.getLogger(package) for package in server_packages()]
    for logger in loggers:
        logger.setLevel(logging.INFO)  # the logs are the program's, here the test's
    with serving(repository, flags=given) as server:
        yield server
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
