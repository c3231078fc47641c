"""Latency of small requests while a server is busy with other work."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from statistics import median

from bench.servers import ROOT

LIMIT_S = 120.0


class Ended(RuntimeError):
    """The work that keeps the server busy failed; the text says how."""


def curl(*arguments: str) -> list[str]:
    """Arguments of a curl that fails for HTTP errors, and discards the answer."""
    return ["curl", "--silent", "--show-error", "--fail", "--output", "/dev/null", *arguments]


def delays_during(command: Sequence[str], ask: Callable[[], object]) -> tuple[float, list[float]]:
    """Repeats a request while a command runs, which shares no interpreter with the requests.

    Returns:
        The seconds that the command took, and those of each request that was under way meanwhile.

    Raises:
        Ended: The command failed or did not end in time.
    """
    taken: list[float] = []
    begin = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            asked = time.perf_counter()
            ask()
            taken.append(time.perf_counter() - asked)
            if asked - begin > LIMIT_S:
                process.kill()
                raise Ended(f"{command[0]} did not end within {LIMIT_S:.0f} s")
        elapsed = time.perf_counter() - begin
        assert process.stderr is not None
        if process.returncode:
            raise Ended(process.stderr.read().decode(errors="replace").strip())
    return elapsed, taken


def delays_alone(seconds: float, ask: Callable[[], object]) -> list[float]:
    """The same for a time in which nothing else happens."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while (asked := time.perf_counter()) < end:
        ask()
        taken.append(time.perf_counter() - asked)
    return taken


class Http:
    """One persistent connection, and a request that is repeated on it.

    Args:
        address: The server's.
        method: The request's.
        path: Its path.
        body: Its body.
        headers: Its headers.
        tls: Trusted roots; None for a server without TLS.
    """

    def __init__(
        self,
        address: str,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connection = (
            http.client.HTTPSConnection(address, timeout=LIMIT_S, context=tls)
            if tls
            else http.client.HTTPConnection(address, timeout=LIMIT_S)
        )
        self._request = (method, path, body, headers or {})

    def __call__(self) -> bytes:
        """The answer's body.

        Raises:
            Ended: The status is not 200.
        """
        method, path, body, headers = self._request
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != http.client.OK:
            raise Ended(f"{method} {path}: {response.status} {answer[:200]!r}")
        return answer

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def spread_ms(taken: Sequence[float]) -> str:
    """Median and worst in milliseconds."""
    return f"{median(taken) * 1e3:,.2f} ms [max {max(taken) * 1e3:,.1f}]"
