"""Runs a repository agent's library: ``python -m conch_native.agent_process FD LIBRARY``.

Requests and replies are lines of JSON on the socket; the end of the socket ends the process. The first line
that it writes says whether the library could be opened. Uses nothing of conch.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from io import BufferedRWPair
from typing import Any

from conch_native import library

CODES = (
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)


class AgentError(Exception):
    """An error of the library.

    Attributes:
        code: Triton's code.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Agent:
    """An opened library, and the loads that it follows.

    Raises:
        AgentError: It can't be opened.
    """

    def __init__(self, path: str) -> None:
        self._host = ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
        self._host.conch_error_text.restype = ctypes.c_char_p
        self._agent = ctypes.c_void_p()
        self._models: dict[int, ctypes.c_void_p] = {}
        self._check(self._host.conch_open_agent(ctypes.byref(self._agent), os.fsencode(path)))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Runs a request; returns the location of the model.

        Raises:
            AgentError: The library's.
        """
        number = request["model"]
        if request["operation"] == "open":
            self._open(number, request)
            return {}
        if request["operation"] == "close":
            self._check(self._host.conch_close_agent_model(self._agent, self._models.pop(number)))
            return {}
        location = ctypes.c_char_p()
        model, action = self._models[number], request["action"]
        self._check(self._host.conch_run_agent(self._agent, model, action, ctypes.byref(location)))
        return {"location": os.fsdecode(location.value or b"")}

    def close(self) -> None:
        """Finalizes the library.

        Raises:
            AgentError: The library's.
        """
        self._check(self._host.conch_close_agent(self._agent))

    def _open(self, number: int, request: dict[str, Any]) -> None:
        parameters = request["parameters"]
        texts = ctypes.c_char_p * len(parameters)
        keys = texts(*(key.encode() for key in parameters))
        values = texts(*(value.encode() for value in parameters.values()))
        model = self._models[number] = ctypes.c_void_p()
        location, config = os.fsencode(request["location"]), request["config"].encode()
        made = (self._agent, ctypes.byref(model), location, config, len(parameters), keys, values)
        self._check(self._host.conch_open_agent_model(*made))

    def _check(self, code: int) -> None:
        if code != -1:
            text = self._host.conch_error_text().decode(errors="replace")
            raise AgentError(CODES[code] if 0 <= code < len(CODES) else "UNKNOWN", text)


def write_line(to: BufferedRWPair, record: dict[str, Any]) -> None:
    """Writes a line of JSON."""
    to.write(json.dumps(record).encode() + b"\n")
    to.flush()


def main() -> None:
    """Serves until the socket ends."""
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rwb") as file:
        try:
            agent = Agent(sys.argv[2])
        except AgentError as error:
            write_line(file, {"code": error.code, "error": str(error)})
            return
        write_line(file, {})
        for line in file:
            try:
                reply = agent.answer(json.loads(line))
            except AgentError as error:
                reply = {"code": error.code, "error": str(error)}
            write_line(file, reply)
        try:
            agent.close()
        except AgentError as error:
            sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    os._exit(0)  # without exit handlers of libraries


if __name__ == "__main__":
    main()
