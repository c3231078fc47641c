"""A model that does to its own process what its requests tell it to, by the parameter ``do``.

It answers IN with OUT, and says in PID which process it ran in. Files that the config's parameters name make
its `initialize` misbehave for as long as they exist.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_LONG_S = 1000.0


class TritonPythonModel:
    """See the module."""

    def initialize(self, args: dict[str, str]) -> None:
        """Misbehaves on request."""
        parameters = json.loads(args["model_config"])["parameters"]

        def told(name: str) -> bool:
            return name in parameters and Path(parameters[name]["string_value"]).exists()

        if told("exits"):
            sys.stderr.write("leaving now\n")
            os._exit(3)
        if told("raises"):
            raise ValueError("told to")
        if told("hangs"):
            time.sleep(_LONG_S)
        if "finalized" in parameters:
            self._finalized = Path(parameters["finalized"]["string_value"])
        self._children: list[subprocess.Popen[bytes]] = []

    def execute(self, requests: list[Any]) -> list[Any]:
        """Does what the requests say, and answers."""
        responses = []
        for request in requests:
            orders = json.loads(request.parameters())
            if path := orders.get("started"):
                Path(path).touch()
            self._do(orders.get("do", ""))
            value = request.inputs()[0].as_numpy()
            pid = np.full_like(value, os.getpid())
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value), pb_utils.Tensor("PID", pid)])
            )
        return responses

    def finalize(self) -> None:
        """Leaves a file, if the config names one."""
        if hasattr(self, "_finalized"):
            self._finalized.touch()

    def _do(self, what: str) -> None:
        orders: dict[str, Callable[[], object]] = {
            "": lambda: None,
            "exit": lambda: os._exit(5),
            "raise SystemExit": lambda: sys.exit(6),
            "crash": lambda: ctypes.string_at(8),
            "hang": lambda: time.sleep(_LONG_S),
            "hang in C": lambda: ctypes.PyDLL(None).sleep(int(_LONG_S)),  # it keeps the interpreter's lock
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "eat": lambda: np.ones(1 << 30, np.uint8),
            "close": _close,
            "garbage": _write_garbage,
            "print": _write_megabytes,
            "spawn": self._spawn,
            "fork": _fork,
            "bomb": _bomb,
        }
        orders[what]()

    def _spawn(self) -> None:
        code = "import time; time.sleep(1000)"
        self._children += [subprocess.Popen([sys.executable, "-c", code], close_fds=False) for _ in range(2)]
        for _ in range(4):
            threading.Thread(target=time.sleep, args=(_LONG_S,)).start()


def _fork() -> None:
    if os.fork() == 0:
        time.sleep(_LONG_S)


def _bomb() -> None:
    """Becomes 512 processes that keep the processors busy, for a while."""
    end = time.monotonic() + 30
    for _ in range(9):
        os.fork()
    while time.monotonic() < end:
        pass
    os._exit(0)


def _close() -> None:
    os.closerange(3, 1000)
    time.sleep(_LONG_S)


def _write_garbage() -> None:
    for fd in range(3, 100):
        try:
            os.write(fd, b"garbage" * 10)
        except OSError:
            continue
    time.sleep(_LONG_S)


def _write_megabytes() -> None:
    for _ in range(64):
        sys.stdout.write("line\n" * 20_000)
        sys.stderr.write("x" * 100_000)
