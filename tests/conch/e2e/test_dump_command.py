"""`conch dump`: the stacks of a server and its workers, also where Python code holds everything up."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.servers import (
    CONCH,
    WAIT_S,
    ServerProcess,
    client_of,
    copy_example,
    eventually,
    serving_process,
    simple_inputs,
    write_model,
)

HOLDS = """
import re

class TritonPythonModel:
    def execute(self, requests):
        return forever()

def forever():
    # One call of C code that keeps the interpreter's lock.
    re.match("(a*)*b", "a" * 40)
"""
CONFIG = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1, 16 ] }
input { name: "INPUT1" data_type: TYPE_INT32 dims: [ 1, 16 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
IN_WORKER = 'parameters { key: "CONCH_PLACEMENT" value { string_value: "worker" } }'
IN_PROCESS = 'parameters { key: "CONCH_PLACEMENT" value { string_value: "in_process" } }'


def dumped(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [CONCH, "dump", *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def dump_with(server: ServerProcess, text: str) -> str:
    def found() -> str:
        code, output, errors = dumped(str(server.process.pid))
        assert (code, errors) == (0, ""), output + errors
        return output if text in output else ""

    return str(eventually(found, f"'{text}' is among the stacks"))


@pytest.mark.slow
def test_a_server_and_its_worker(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    write_model(tmp_path, "holds", CONFIG + IN_WORKER, {"model.py": HOLDS})
    with serving_process(tmp_path) as server, client_of(server) as client:
        call = client.async_infer("holds", simple_inputs(), lambda result, error: None)
        output = dump_with(server, "in forever")
        ours, theirs = output.split("== pid ")[1:]
        assert ours.startswith(f"{server.process.pid}: ") and ours.count("Thread 0x") > 3
        assert "/host/main.py" in theirs and "in forever" in theirs
        client.infer("simple", simple_inputs())
        assert len(dump_with(server, "in forever").split("== pid ")) == 3, "it can be asked again"
        call.cancel()
        os.kill(int(theirs.partition(":")[0]), signal.SIGKILL)


@pytest.mark.slow
def test_a_server_that_hangs(tmp_path: Path) -> None:
    write_model(tmp_path, "holds", CONFIG + IN_PROCESS, {"model.py": HOLDS})
    with serving_process(tmp_path) as server, client_of(server) as client:
        client.async_infer("holds", simple_inputs(), lambda result, error: None)
        assert "in execute" in dump_with(server, "in forever")
        server.kill()


def test_other_processes_get_no_signal() -> None:
    for pid in (1, os.getpid()):
        assert dumped(str(pid)) == (2, "", f"conch dump: {pid} is not a conch server of this user\n")
