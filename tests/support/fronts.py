"""Front processes of servers under test."""

from __future__ import annotations

import urllib.request

import psutil
from tests.support.servers import WAIT_S, AnyServer, ServerProcess


def front_processes(server: ServerProcess) -> list[psutil.Process]:
    """The processes of its fronts that live."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        try:
            if "conch.fronts.front_process" in child.cmdline():
                found.append(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def front_metrics(server: AnyServer, name: str) -> list[float]:
    """The samples of a metric, such as one for each front."""
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]
