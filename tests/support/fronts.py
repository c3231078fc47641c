"""Front processes of servers under test."""

from __future__ import annotations

import urllib.request

from tests.support.servers import WAIT_S, AnyServer


def front_metrics(server: AnyServer, name: str, *headers: tuple[str, str]) -> list[float]:
    """The samples of a metric, such as one for each front."""
    request = urllib.request.Request(server.metrics_url, headers=dict(headers))
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]
