"""Completes a config in a short-lived worker process, by a model's code or a library."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from conch.backends.python.python_settings import Settings
from conch.core.errors import ERRORS_BY_CODE, InternalError, InvalidArgumentError, UnavailableError
from conch.core.model_control import load_cancelled
from conch.ipc.channel import WireError
from conch.ipc.codec import decode_json
from conch.ipc.spec_json import Library, library_to_json
from conch.ipc.worker_log import WorkerLog
from conch.workers.environment import Environment
from conch.workers.supervision.child_process import ChildProcess, start_worker
from conch.workers.supervision.crash_report import crashed, sentence
from conch.workers.supervision.process_monitor import ProcessMonitor

_END_S = 2.0
"""Timeout of the end of a process that has replied."""

_MOST_REPLY = 16 << 20

_LOOK_S = 0.1
"""Interval of checks whether the load was cancelled or the process died."""


def complete_in_worker(
    monitor: ProcessMonitor,
    environment: Environment,
    config: dict[str, Any],
    directory: Path,
    file_name: str,
    settings: Settings,
    library: Library | None = None,
    has_gpus: bool = False,
) -> dict[str, Any]:
    """Completes a config in JSON form; settings limit time and memory.

    Args:
        monitor: The thread that all workers share.
        environment: Interpreter, variables and packages of the process.
        config: The config.
        directory: The version's directory.
        file_name: The file of a Python model.
        settings: Limits.
        library: The backend, if it is compiled for Triton.
        has_gpus: True if instances that a library wants on GPUs can be there.

    Raises:
        ConchError: The model's error, as if it had run in process; or its process died; or the load was
            stopped.
    """
    name = config.get("name", "")
    log = WorkerLog(name)
    asked = {
        "config": config,
        "directory": str(directory),
        "file_name": file_name,
        "level": log.level,
        "memory_limit_mb": settings.memory_limit_mb,
    }
    what = f"auto_complete_config function of model '{name}'"
    if library is not None:
        what = f"TRITONBACKEND_ModelInitialize of model '{name}'"
        asked |= {"library": library_to_json(library), "has_gpus": has_gpus}
    timeout_s = settings.start_timeout_s
    process, ours = start_worker(monitor, name, environment, "complete")
    with ours:
        try:
            result = _Exchange(name, process, ours, log, timeout_s).ask(json.dumps(asked).encode())
            # The wait for the model's threads, children and exit handlers is limited.
            process.wait(_END_S)
        except TimeoutError:
            raise UnavailableError(
                f"{what} took longer than {timeout_s:g} s, which is what 'CONCH_START_TIMEOUT_SECONDS' allows"
            ) from None
        except _StoppedError:
            raise UnavailableError(f"{what} was ended, as the load was stopped") from None
        finally:
            process.kill()
            process.wait()
    if result is None:
        raise crashed(name, sentence(process.how), process.errors, library)
    if "code" in result:
        raise ERRORS_BY_CODE.get(result["code"], InternalError)(result["message"])
    completed: dict[str, Any] = result["config"]
    return completed


class _StoppedError(Exception):
    """The load was cancelled."""


class _Exchange:
    """Sends one request to a process, logs its records and reads its reply."""

    def __init__(
        self, name: str, process: ChildProcess, ours: socket.socket, log: WorkerLog, timeout_s: float | None
    ) -> None:
        self._process = process
        self._name = name
        self._socket = ours
        self._log = log
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._stopped = load_cancelled()
        ours.settimeout(_LOOK_S)

    def ask(self, question: bytes) -> dict[str, Any] | None:
        """Sends the request and waits for the reply; None if the process ends without one.

        Raises:
            TimeoutError: The timeout has passed.
            _StoppedError: The load was stopped.
        """
        try:
            self._send(question)
            return self._answer()
        except (BrokenPipeError, ConnectionResetError, WireError):
            return None

    def _send(self, question: bytes) -> None:
        rest = memoryview(question)
        while rest:
            self._look()
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                pass
        self._socket.shutdown(socket.SHUT_WR)

    def _answer(self) -> dict[str, Any] | None:
        rest = bytearray()
        while True:
            self._look()
            ended = bool(self._process.how)  # checked first: what it sent before can then be read
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                if ended:
                    return None  # only its children hold the other end
                continue
            if not data:
                return None
            *ends, data = data.split(b"\n")
            for end in ends:
                said = decode_json(rest + end)
                rest.clear()
                if "log" not in said:
                    return said
                self._log.handle(said["log"])
            rest += data
            if len(rest) > _MOST_REPLY:
                raise InvalidArgumentError(
                    f"auto_complete_config function of model '{self._name}' has returned a config of more "
                    f"than {_MOST_REPLY >> 20} MiB"
                )

    def _look(self) -> None:
        if self._end is not None and time.monotonic() >= self._end:
            raise TimeoutError
        if self._stopped():
            raise _StoppedError
