"""`conch health`: asks the server on this machine whether it is ready; the image's health check.

The server's settings, and so its port, are read from its command line and environment.
"""

from __future__ import annotations

import argparse
import http.client
import ssl
import sys
from collections.abc import Sequence
from contextlib import closing

from conch.cli.server_processes import ServerProcesses, command, environment
from conch.cli.settings.settings_reader import read_flags
from conch.core.timed_response import TimedResponse
from conch.frontends.access_policy import parse_restricted_apis
from conch.process.endpoint import local_address
from conch.settings.option import FlagError, Settings

READY, NOT_READY = 0, 1
"""Exit codes."""

_TIMEOUT_S = 4.0


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="conch health",
        description="Asks the server of this user on this machine whether it is ready, over HTTP.",
        epilog="exit codes: 0 it is ready, 1 it is not, can't be asked, or is not the only one",
        allow_abbrev=False,
    )
    parser.add_argument("pid", type=int, nargs="?", help="the server; by default the only one there is")
    pid: int | None = parser.parse_args(arguments).pid
    try:
        state = _state(_only_server() if pid is None else pid)
    except (FlagError, OSError, http.client.HTTPException) as error:
        print(f"conch health: {error}", file=sys.stderr)
        return NOT_READY
    print(state)
    return READY if state == "ready" else NOT_READY


def _only_server() -> int:
    servers = ServerProcesses().servers
    if len(servers) != 1:
        which = ", ".join(f"{each} ({' '.join(command(each))})" for each in servers)
        raise FlagError(f"name one of {which}" if which else "no server found")
    return servers[0]


def _state(pid: int) -> str:
    words = command(pid)
    # Whatever has started the server, flags of `conch serve` are the first words with two dashes.
    flags = next((words[at:] for at, word in enumerate(words) if word.startswith("--")), [])
    settings = read_flags(flags, environment(pid), as_triton=True)  # a wrong flag would have ended its start
    if not settings["allow-http"] or not settings["http-port"]:
        raise FlagError("the server can't be asked: it needs --allow-http and a --http-port that is not 0")
    with closing(_connection(settings)) as connection:
        connection.response_class = TimedResponse
        connection.request("GET", "/v2/health/ready", headers=_secret(settings))
        return "ready" if connection.getresponse().status == http.HTTPStatus.OK else "not ready"


def _connection(settings: Settings) -> http.client.HTTPConnection:
    address = local_address(settings["http-address"], settings["http-port"])
    if not settings["http-use-ssl"]:
        return http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    # The certificate is for another name than that of this machine, where the server's files are at hand.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if settings["http-root-cert"] is not None:
        raise FlagError(
            "the server can't be asked: it wants a certificate of its clients (--http-root-cert, "
            "--tls-client-ca)"
        )
    return http.client.HTTPSConnection(address, timeout=_TIMEOUT_S, context=context)


def _secret(settings: Settings) -> dict[str, str]:
    """The header that the server wants if its health is a restricted API."""
    restricted = parse_restricted_apis(settings["http-restricted-api"]).get("health")
    return {} if restricted is None else {restricted[0]: restricted[1]}
