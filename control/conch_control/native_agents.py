"""Repository agents compiled for Triton, ``libtritonrepoagent_NAME.so``: a process for each library.

A process starts with the first load that needs the agent, and ends with the last model that it was loaded by,
as the library may keep state meanwhile.

Threads and locks: one lock for the table of processes, and one for each process's socket.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import socket
import subprocess
import sys
import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from conch.core.errors import ERRORS_BY_CODE, InternalError, InvalidArgumentError, UnavailableError
from conch_control.repoagents import HookClass, ModelContext, RepositoryHook, find_hook

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LOAD, _LOAD_COMPLETE, _LOAD_FAIL, _UNLOAD, _UNLOAD_COMPLETE = range(5)


class NativeAgents:
    """Finds agents, also those in libraries of a directory.

    Args:
        directory: Has ``NAME/libtritonrepoagent_NAME.so``; None for no libraries.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._processes: dict[Path, _AgentProcess] = {}

    def find(self, name: str) -> HookClass:
        """Finds an agent; those of Python come first.

        Raises:
            InvalidArgumentError: There is none.
        """
        try:
            return find_hook(name)
        except InvalidArgumentError as error:
            path = self._library(name)
            if path is None:
                raise
            if not path.is_file():
                raise InvalidArgumentError(
                    f"{error.message}; unable to find '{path.name}' for repo agent '{name}', searched: "
                    f"{path.parent}"
                ) from None
        return partial(_NativeHook, self, name, path)

    def has_library(self, name: str) -> bool:
        """True if an agent is a library."""
        path = self._library(name)
        return path is not None and path.is_file()

    def _library(self, name: str) -> Path | None:
        if self._directory is None or _NAME.fullmatch(name) is None:
            return None
        return self._directory.absolute() / name / f"libtritonrepoagent_{name}.so"

    def acquire(self, name: str, path: Path) -> _AgentProcess:
        """The process of a library, started if need be; each call needs a `release`.

        Raises:
            ConchError: The library can't be opened.
        """
        with self._lock:
            process = self._processes.get(path)
            if process is None or process.ended:
                process = self._processes[path] = _AgentProcess(name, path)
            process.users += 1
            return process

    def release(self, path: Path, process: _AgentProcess) -> None:
        """Ends the process after its last user."""
        with self._lock:
            process.users -= 1
            if process.users:
                return
            if self._processes.get(path) is process:
                del self._processes[path]
        process.close()


class _AgentProcess:
    """A process with a library, and its socket."""

    def __init__(self, name: str, path: Path) -> None:
        spec = importlib.util.find_spec("conch_native")
        if spec is None or spec.origin is None:
            raise UnavailableError(
                f"repository agent '{name}' is a library compiled for Triton, which needs the package "
                f"conch-native: pip install --find-links dist 'conch[native]', in a checkout after "
                f"`make wheel`"
            )
        self.users = 0
        self.ended = False
        self._name = name
        self._lock = threading.Lock()
        self._numbers = count()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "conch_native.agent_process", str(theirs.fileno()), str(path)]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=path.parent
            )
        self._socket = ours
        self._file = ours.makefile("rwb")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def number(self) -> int:
        """A number for a load."""
        return next(self._numbers)

    def ask(self, **request: object) -> dict[str, Any]:
        """Sends a request and returns the reply.

        Raises:
            ConchError: The library's error, or the process has ended.
        """
        with self._lock:
            try:
                self._file.write(json.dumps(request).encode() + b"\n")
                self._file.flush()
            except OSError:
                raise self._end() from None
            return self._read()

    def close(self) -> None:
        """Ends the process, which finalizes its library first."""
        self.ended = True
        self._file.close()
        self._socket.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        try:
            line = self._file.readline()
        except OSError:
            line = b""
        if not line:
            raise self._end()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ERRORS_BY_CODE.get(reply["code"], InternalError)(reply["error"])
        return reply

    def _end(self) -> UnavailableError:
        self.ended = True
        status = self._process.wait()
        how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
        return UnavailableError(f"the process of repository agent '{self._name}' has ended {how}")


class _NativeHook(RepositoryHook):
    """One load of a model with an agent in a library."""

    def __init__(self, agents: NativeAgents, name: str, path: Path, context: ModelContext) -> None:
        super().__init__(context)
        self._agents = agents
        self._name = name
        self._path = path

    def load(self, directory: Path) -> Path:
        self._process = self._agents.acquire(self._name, self._path)
        self._number = self._process.number()
        try:
            config = json.dumps(self.context.config)
            self._ask("open", location=str(directory), config=config, parameters=self.context.parameters)
            location: str = self._ask("run", action=_LOAD)["location"]
            return Path(location)
        except BaseException:
            # Triton tells an agent whose own load failed, too; a `RepositoryHook` is not told.
            self.load_failed()
            raise

    def load_complete(self) -> None:
        self._ask("run", action=_LOAD_COMPLETE)

    def load_failed(self) -> None:
        self._end(_LOAD_FAIL)

    def unload(self) -> None:
        self._ask("run", action=_UNLOAD)

    def unload_complete(self) -> None:
        self._end(_UNLOAD_COMPLETE)

    def _ask(self, operation: str, **fields: object) -> dict[str, Any]:
        return self._process.ask(operation=operation, model=self._number, **fields)

    def _end(self, action: int) -> None:
        try:
            if not self._process.ended:
                try:
                    self._ask("run", action=action)
                finally:
                    self._ask("close")
        except Exception as error:  # boundary: the agent's code; an error before it is the one to raise
            log.error(
                "repository agent '%s' failed for model '%s': %s", self._name, self.context.model, error
            )
        finally:
            self._agents.release(self._path, self._process)
