"""Clients of the console: requests as its page sends them, and streams of events."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tests.support.servers import ROOT, WAIT_S

STATIC = ROOT / "services" / "conch_console" / "static"
_LEAST_NODE = (20, 19)  # which takes .js files with imports for modules


def node_problem() -> str:
    """Why there is no usable node; empty if there is one."""
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
