"""Logs without a reader: requests are answered as if there were none."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import (
    CONCH,
    NUMBER_CONFIG,
    START_S,
    WAIT_S,
    ServerProcess,
    client_of,
    eventually,
    free_port,
    serving_process,
    tensor,
    write_model,
)
from tritonclient.utils import InferenceServerException

# More than may wait to be written.
_CHATTY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            pb_utils.Logger.log_warn("x" * 30_000)
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""
_REQUESTS = 1000


class PipedServer(ServerProcess):
    """A server whose standard error is a pipe."""

    fixed_port = 0

    def __init__(self, arguments: list[str], directory: Path, pipe: int) -> None:
        self._output = directory / "stdout"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("CONCH_")}
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [str(CONCH), "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=pipe,
                env=inherited,
            )

    @property
    def errors(self) -> str:
        return "(in the pipe)"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.fixed_port}"

    def wait_ready(self) -> None:
        """Its tables are in the pipe, which may have no reader."""

        def ready() -> bool:
            assert self.process.poll() is None
            with closing(triton.InferenceServerClient(self.address)) as client:
                try:
                    return bool(client.is_server_ready())
                except InferenceServerException:
                    return False

        eventually(ready, "conch listens", START_S)


@contextmanager
def piped(repository: Path, directory: Path, *flags: str) -> Iterator[tuple[ServerProcess, int]]:
    """A server that logs to a small pipe, and the end to read it."""
    reader, end = os.pipe()
    try:
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
        port = free_port()
        ports = [f"--grpc-port={port}", "--allow-http=false", "--allow-metrics=false"]
        server = PipedServer([f"--model-repository={repository}", *ports, *flags], directory, end)
        server.fixed_port = port
        os.close(end)
        try:
            server.wait_ready()
            yield server, reader
        finally:
            server.kill()
    finally:
        os.close(reader)


def send(client: triton.InferenceServerClient, count: int) -> None:
    for number in range(count):
        value = np.full(1, number, np.float32)
        result = client.infer("chatty", [tensor("IN", value)], client_timeout=WAIT_S)
        assert result.as_numpy("OUT") == value


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "chatty", NUMBER_CONFIG, {"model.py": _CHATTY})
    return tmp_path / "models"


def test_a_pipe_that_nobody_reads(repository: Path, tmp_path: Path) -> None:
    with piped(repository, tmp_path, "--log-rate-limit=0") as (server, reader):
        with client_of(server) as client:
            send(client, _REQUESTS)
        # A reader that comes after all gets the count of dropped lines.
        text = bytearray()

        def read() -> None:
            while found := os.read(reader, 1 << 20):
                text.extend(found)

        thread = threading.Thread(target=read)
        thread.start()
        eventually(lambda: b"log lines were dropped" in text, "it is told")
        assert server.stop() == 0
        thread.join()
    lines = [json.loads(line) for line in text.decode().splitlines()]
    dropped = sum(line.get("dropped", 0) for line in lines)
    kept = sum(line["message"] == "x" * 30_000 for line in lines)
    assert kept + dropped == _REQUESTS
    assert kept * 30_000 <= 17 * 2**20
    assert lines[-1]["message"] == "successfully unloaded 'chatty' version 1"


def test_a_server_ends_though_nobody_reads(repository: Path, tmp_path: Path) -> None:
    with piped(repository, tmp_path) as (server, _):
        with client_of(server) as client:
            send(client, 10)
        assert server.stop() == 0


def test_a_disk_that_is_full(repository: Path) -> None:
    with serving_process(repository, flags=["--log-file=/dev/full", "--access-log=/dev/full"]) as server:
        with client_of(server) as client:
            send(client, 100)
        assert server.errors == server.output, "there is nothing on standard error but the tables"
