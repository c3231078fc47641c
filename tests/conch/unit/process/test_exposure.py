"""The sentence that says what is open to whom, for command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.cli.settings.settings_reader import read_flags
from conch.process.exposure import exposure, open_control_warning
from conch.server_settings import build_options


def said(*arguments: str) -> str:
    return exposure(build_options(read_flags(arguments, {})))


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
            ("--http-restricted-api=model-repository:key=secret", "--allow-client-shm=false"),
            "open: inference to all clients (gRPC, HTTP); rollouts to clients with the key 'key' (HTTP); "
            "metrics to all clients",
        ),
        (
            ("--model-control-mode=poll", "--allow-model-control=false", "--allow-client-shm=false"),
            "open: inference to all clients (gRPC, HTTP); metrics to all clients",
        ),
        (
            (EXPLICIT, "--allow-client-shm=false"),
            "open: inference to all clients (gRPC, HTTP); loading models to all clients (gRPC, HTTP); "
            "metrics to all clients",
        ),
        (
            # Behind an address of the loopback interface there may be a proxy; a socket has permissions.
            (EXPLICIT, "--allow-client-shm=false", *HERE),
            "open: inference to this machine (gRPC, HTTP); loading models to this machine (gRPC, HTTP); with "
            "files to this machine (gRPC); metrics to this machine",
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
            "with the key 'key' (HTTP); with files to clients with the key 'key' (HTTP); metrics to all "
            "clients",
        ),
        (
            ("--allow-grpc=false", "--allow-http=false", "--allow-metrics=false"),
            "open: nothing",
        ),
        (
            (
                EXPLICIT,
                "--access-policy={policy}",
                "--allow-client-shm=false",
                "--control-port=8003",
                "--console-port=8004",
                "--console-address=0.0.0.0",
            ),
            "open: inference to principals of the access policy (gRPC, HTTP); loading models to principals "
            "of the access policy (gRPC, HTTP); with files to principals of the access policy (gRPC, HTTP); "
            "metrics to principals of the access policy; the control port to principals of the access policy"
            "; the console to principals of the access policy",
        ),
    ],
)
def test_what_is_open_to_whom(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    policy = tmp_path / "access.toml"
    policy.write_text('[[principal]]\nname = "a"\nanonymous = true\ninfer = ["*"]\n')
    assert said(*(each.format(policy=policy) for each in arguments)) == sentence


@pytest.mark.parametrize(
    ("arguments", "ports"),
    [
        ((EXPLICIT,), "gRPC on 0.0.0.0:8001 and HTTP on 0.0.0.0:8000"),
        ((EXPLICIT, "--http-restricted-api=model-repository:k=v"), "gRPC on 0.0.0.0:8001"),
        ((EXPLICIT, "--allow-grpc=false", "--http-address=::"), "HTTP on [::]:8000"),
        ((EXPLICIT, *HERE), None),
        ((EXPLICIT, "--allow-model-control=false"), None),
        ((EXPLICIT, "--access-policy={policy}"), None),
        ((), None),
    ],
)
def test_model_control_that_is_open_is_warned_of(
    tmp_path: Path, arguments: tuple[str, ...], ports: str | None
) -> None:
    policy = tmp_path / "access.toml"
    policy.write_text('[[principal]]\nname = "a"\nanonymous = true\ninfer = ["*"]\n')
    options = build_options(read_flags([each.format(policy=policy) for each in arguments], {}))
    assert open_control_warning(options) == (
        ""
        if ports is None
        else f"all clients that reach {ports} may load and unload models: --allow-model-control=false closes "
        f"this, --access-policy opens it to chosen clients only"
    )
