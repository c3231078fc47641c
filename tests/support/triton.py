"""A real Triton as a process, where one is installed; see bench/setup_peers.sh."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from tests.support.servers import PEERS, WAIT_S, RawClient, eventually, free_port
from tritonclient.grpc import service_pb2

SITE = PEERS / "triton" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
TRITON = SITE / "pytriton" / "tritonserver"
NEEDS_TRITON = [
    pytest.mark.peer,
    pytest.mark.skipif(
        not (TRITON / "bin" / "tritonserver").exists(),
        reason=f"no Triton in {PEERS}; make bench-setup installs it",
    ),
]
"""Marks of a module whose tests compare with a Triton."""


def ready(client: RawClient) -> bool:
    """Whether a server answers that it is ready."""
    try:
        return bool(client("ServerReady", service_pb2.ServerReadyRequest()).ready)
    except grpc.RpcError:
        return False


@contextmanager
def triton_serving(repository: Path) -> Iterator[RawClient]:
    """A client of a Triton that serves a repository, into which it also writes its log."""
    port = free_port()
    base = Path(sys.base_prefix) / "lib"
    environment = {
        "LD_LIBRARY_PATH": f"{SITE / 'nvidia_pytriton.libs'}:{base}",
        "PYTHONPATH": str(SITE),
        "PATH": f"{PEERS / 'triton' / 'bin'}:/usr/bin:/bin",
    }
    flags = [f"--grpc-port={port}", "--allow-http=false", "--allow-metrics=false"]
    with (repository / "triton.log").open("w") as log:
        process = subprocess.Popen(
            [
                TRITON / "bin" / "tritonserver",
                f"--model-repository={repository}",
                f"--backend-directory={TRITON / 'backends'}",
                *flags,
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        with closing(RawClient(f"127.0.0.1:{port}")) as client:
            eventually(lambda: ready(client), "Triton is ready", 60)
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait(WAIT_S)
