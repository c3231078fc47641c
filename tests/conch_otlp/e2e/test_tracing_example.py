"""The example of traces, as its README has it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from tests.support.servers import ROOT, WAIT_S, serving_process

EXAMPLE = ROOT / "examples" / "tracing"


@contextmanager
def collector() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of the example's collector, and its process."""
    command = [sys.executable, str(EXAMPLE / "collector.py"), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process.stderr.readline().split()[-1], process
        finally:
            process.kill()


def test_the_collector_draws_a_request() -> None:
    readme = (EXAMPLE / "README.md").read_text()
    drawn = re.findall(r"^( *)(\w+) +\|", readme, re.MULTILINE)
    with collector() as (address, process):
        settings = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={address}")
        flags = [f"--trace-config={setting}" for setting in settings]
        with serving_process(EXAMPLE / "models", flags=flags) as server:
            url = f"http://{server.http_address}/v2/models/review/generate"
            answer = httpx.post(url, json={"TEXT": "This was a great and lovely film."}, timeout=WAIT_S)
            assert round(answer.json()["RATING"], 3) == 1.333
        assert process.stdout is not None  # the server has sent what waited
        lines = [process.stdout.readline() for _ in range(1 + len(drawn))]
    assert re.findall(r"^( *)(\w+) +\|", "".join(lines), re.MULTILINE) == drawn
    assert len(drawn) == 8
