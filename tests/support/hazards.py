"""Models in worker processes: writing them, and finding their processes and blocks of memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as triton
from tests.support.servers import WAIT_S, ServerProcess, eventually, tensor, write_model

_HAZARDS = Path(__file__).with_name("hazards_model.py")
_CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }}
    output {{ name: "PID" data_type: TYPE_INT32 dims: [ -1 ] }}
    instance_group {{ count: {count} kind: KIND_CPU }}
"""


def write_hazards(repository: Path, name: str = "hazards", count: int = 1, **parameters: str) -> Path:
    """Writes a model, in workers by default, that does what its requests tell it to; see `hazards_model`."""
    config = _CONFIG.format(count=count)
    for key, value in parameters.items():
        config += f'    parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    return write_model(repository, name, config, {"model.py": _HAZARDS.read_text()})


def ask(
    client: triton.InferenceServerClient,
    model: str = "hazards",
    orders: Mapping[str, Any] | None = None,
    value: int = 7,
    timeout_s: float = WAIT_S,
) -> int:
    """Sends a request to such a model, checks the answer, and returns the process that gave it."""
    inputs = [tensor("IN", np.array([value], np.int32), "INT32")]
    result = client.infer(model, inputs, parameters=dict(orders or {}), client_timeout=timeout_s)
    assert result.as_numpy("OUT").tolist() == [value]
    return int(result.as_numpy("PID")[0])


def workers_of(server: ServerProcess) -> list[psutil.Process]:
    """The worker processes of a server, and what they have started."""
    process = psutil.Process(server.process.pid)
    others = {other.pid for other in (*templates_of(server), *fronts_of(server))}
    return [child for child in process.children(recursive=True) if child.pid not in others]


def templates_of(server: ServerProcess) -> list[psutil.Process]:
    """The processes that the server's workers are forked from."""
    return [child for child in psutil.Process(server.process.pid).children() if _is_template(child)]


def fronts_of(server: ServerProcess) -> list[psutil.Process]:
    """Its front processes that live."""
    return [child for child in psutil.Process(server.process.pid).children() if _is_front(child)]


def _is_front(process: psutil.Process) -> bool:
    try:
        return "conch.fronts.front_process" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def _is_template(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("/host/main.py") for part in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return True  # one that has just ended


def suspend(process: psutil.Process) -> None:
    """Suspends a process, and waits until all its threads have stopped: on a busy machine they run on."""
    process.suspend()
    eventually(lambda: set(map(_state, _tasks(process))) == {"T"}, "it is suspended")


def _tasks(process: psutil.Process) -> list[Path]:
    return list(Path(f"/proc/{process.pid}/task").iterdir())


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def blocks_of(pid: int) -> int:
    """Number of blocks of memory of which a process has descriptors."""
    return sum(map(_is_block, _descriptors_of(pid)))


def descriptors_besides_blocks_of(pid: int) -> int:
    """Number of other descriptors of a process: it keeps blocks for a while."""
    descriptors = _descriptors_of(pid)
    return len(descriptors) - sum(map(_is_block, descriptors))


def _is_block(descriptor: str) -> bool:
    return "conch-tensors" in descriptor


def _descriptors_of(pid: int) -> list[str]:
    """Targets of a process's descriptors."""
    links = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return links
