"""Asks a model's `auto_complete_config` in a process that ends with the answer."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from conch.core.errors import ERRORS_BY_CODE, InternalError, UnavailableError
from conch.workers import wire
from conch.workers.environments import Environment
from conch.workers.monitor import Monitor
from conch.workers.process import start_worker
from conch.workers.records import WorkerLog
from conch.workers.reports import crashed, sentence

_END_S = 5.0
"""How long a process may take to end once it has answered."""


def complete_in_worker(
    monitor: Monitor,
    environment: Environment,
    config: dict[str, Any],
    directory: Path,
    file_name: str,
    timeout_s: float | None,
) -> dict[str, Any]:
    """The completed config.

    Args:
        monitor: The thread that starts the process.
        environment: Where it runs.
        config: The config in JSON form.
        directory: The version's directory.
        file_name: The model's file in it.
        timeout_s: How long it may take; None for as long as it takes.

    Raises:
        ConchError: What the model raised, as if it had been asked in this process; or its process died.
    """
    name = config.get("name", "")
    log = WorkerLog(name)
    asked = {"config": config, "directory": str(directory), "file_name": file_name, "level": log.level}
    process, ours = start_worker(monitor, name, environment, "complete")
    end = None if timeout_s is None else time.monotonic() + timeout_s
    with ours:
        try:
            result = _exchange(ours, json.dumps(asked).encode(), log, end)
            # What the model's threads or exit handlers do is not waited for for ever.
            process.wait(_END_S)
        except TimeoutError:
            raise UnavailableError(
                f"auto_complete_config function of model '{name}' took longer than {timeout_s:g} s, which is "
                f"what 'CONCH_START_TIMEOUT_SECONDS' allows"
            ) from None
        finally:
            process.kill()
            process.wait()
    if result is None:
        raise crashed(name, sentence(process.how), process.errors)
    if "code" in result:
        raise ERRORS_BY_CODE.get(result["code"], InternalError)(result["message"])
    completed: dict[str, Any] = result["config"]
    return completed


def _exchange(
    ours: socket.socket, question: bytes, log: WorkerLog, end: float | None
) -> dict[str, Any] | None:
    """Sends the question, and logs what is to be logged until the process closes its end.

    Returns:
        The answer; None if there is none, or not all of it.
    """
    result = None
    rest = b""
    try:
        _limit(ours, end)
        ours.sendall(question)
        ours.shutdown(socket.SHUT_WR)
        while True:
            _limit(ours, end)
            data = ours.recv(1 << 16)
            if not data:
                return result
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = wire.decode_json(line)
                if "log" in said:
                    log.handle(said["log"])
                else:
                    result = said
    except (BrokenPipeError, ConnectionResetError, wire.WireError):
        return None


def _limit(ours: socket.socket, end: float | None) -> None:
    if end is not None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        ours.settimeout(left)
