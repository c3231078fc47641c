"""`breakpoint()` in a model that runs in the server's process, at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import CONCH, WAIT_S

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    KIND execute(self, requests):
        answer = 41
        breakpoint()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("B", request.inputs()[0].as_numpy() + answer)])
            for request in requests
        ]
"""

CONFIG = """
    backend: "python"
    input { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "B" data_type: TYPE_INT32 dims: [ 1 ] }
    parameters { key: "CONCH_PLACEMENT" value { string_value: "in_process" } }
"""


class Terminal:
    """A terminal with a server in it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""
        self.everything = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        """Waits for something to appear after what was waited for before."""
        deadline = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self._seen)):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._descriptor], [], [], max(left, 0))
            assert ready, f"no {pattern!r} in:\n{self.everything}"
            text = os.read(self._descriptor, 65536).decode().replace("\r\n", "\n")
            self._seen += text
            self.everything += text
        self._seen = self._seen[found.end() :]
        return found

    def type(self, line: str) -> None:
        """Types a line."""
        os.write(self._descriptor, f"{line}\n".encode())


@contextmanager
def served_in_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    ours, theirs = pty.openpty()
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CONCH_")}
    try:
        process = subprocess.Popen(
            [str(CONCH), "serve", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**inherited, "TERM": "dumb", "CONCH_HTTP_PORT": "0", "CONCH_METRICS_PORT": "0"},
        )
    finally:
        os.close(theirs)
    try:
        yield process, Terminal(ours)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT_S)
        os.close(ours)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_model_can_be_looked_into(tmp_path: Path, kind: str) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(MODEL.replace("KIND", kind))
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    arguments = f"--model-repository={tmp_path}", "--grpc-port=0"
    with served_in_a_terminal(*arguments) as (process, terminal), ThreadPoolExecutor() as threads:
        address = terminal.read_until(r"\| gRPC +\| (\S+)")[1].replace("0.0.0.0", "127.0.0.1")
        with triton.InferenceServerClient(address) as client:
            tensor = triton.InferInput("A", [1], "INT32")
            tensor.set_data_from_numpy(np.ones(1, np.int32))
            answer = threads.submit(client.infer, "m", [tensor])
            # It stops in the model, below the line, and says where.
            terminal.read_until(r"model\.py\(\d+\)execute\(\)")
            terminal.read_until(r"\(Pdb\) ")
            terminal.type("p answer * 2")
            terminal.read_until(r"\n82\n")
            terminal.read_until(r"\(Pdb\) ")
            # The server goes on meanwhile.
            assert client.is_server_live()
            terminal.type("answer = 6")
            terminal.read_until(r"\(Pdb\) ")
            terminal.type("c")
            assert answer.result(WAIT_S).as_numpy("B").tolist() == [7]
        process.terminate()
        terminal.read_until("in-flight requests")
        assert process.wait(WAIT_S) == 0, terminal.everything
    assert "Traceback" not in terminal.everything
