"""The sentence that says what is open to whom, for command lines."""

from __future__ import annotations

import pytest

from conch.cli.settings.settings_reader import read_flags
from conch.process.exposure import exposure
from conch.server_options import build_options


def said(*arguments: str) -> str:
    options = build_options(read_flags(arguments, {}))
    return exposure(
        options.server,
        options.control.mode,
        options.grpc,
        options.http,
        options.metrics,
        options.control_port,
    )


HERE = ("--grpc-address=unix:/run/s", "--http-address=127.0.0.1")
EXPLICIT = "--model-control-mode=explicit"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (),
            "open: inference to all clients (gRPC, HTTP); shared memory to all clients (gRPC, HTTP); metrics "
            "to all clients",
        ),
        (
            (EXPLICIT, "--allow-client-shm=false"),
            "open: inference to all clients (gRPC, HTTP); loading models to all clients (gRPC, HTTP); with "
            "files to this machine (gRPC, HTTP); metrics to all clients",
        ),
        (
            (EXPLICIT, "--allow-model-upload", "--allow-client-shm=false", "--allow-metrics=false"),
            "open: inference to all clients (gRPC, HTTP); loading models to all clients (gRPC, HTTP); with "
            "files to all clients (gRPC, HTTP)",
        ),
        (
            (
                EXPLICIT,
                "--allow-model-control=false",
                "--allow-client-shm=false",
                *HERE,
                "--control-port=8003",
            ),
            "open: inference to this machine (gRPC, HTTP); metrics to this machine; the control port to this "
            "machine",
        ),
        (
            (EXPLICIT, "--http-restricted-api=model-repository:key=secret", "--allow-client-shm=false"),
            "open: inference to all clients (gRPC, HTTP); loading models to all clients (gRPC) and clients "
            "with the key 'key' (HTTP); with files to this machine (gRPC) and clients with the key 'key' "
            "(HTTP); metrics to all clients",
        ),
        (
            ("--allow-grpc=false", "--allow-http=false", "--allow-metrics=false"),
            "open: nothing",
        ),
    ],
)
def test_what_is_open_to_whom(arguments: tuple[str, ...], sentence: str) -> None:
    assert said(*arguments) == sentence
