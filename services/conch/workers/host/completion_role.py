"""The role of a process that completes a config, replies and ends.

It calls the `auto_complete_config` of a Python model, or the library of a backend compiled for Triton.

It reads one JSON object from the socket, to its end, and writes JSON lines: log records as ``log``, then the
reply.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from conch.backends.python.api.pb_model_config import auto_complete
from conch.backends.python.runtime.python_instance import load_code
from conch.backends.python.runtime.tracebacks import limit_memory
from conch.core.errors import ConchError
from conch.ipc import codec
from conch.ipc.spec_json import Library, library_from_json
from conch.ipc.worker_log import log_to_server


def complete(descriptor: int) -> None:
    """Completes the config that arrives on the socket with this descriptor."""
    with socket.socket(fileno=descriptor) as server:
        server.set_inheritable(False)
        with server.makefile("rb") as file:
            fields = json.loads(file.read())
        lock = threading.Lock()  # the model's threads log too

        def send(line: bytes) -> None:
            with lock:
                server.sendall(line + b"\n")

        log_to_server(lambda record: send(b'{"log":' + record + b"}"), fields.pop("level"))
        memory_limit_mb = fields.pop("memory_limit_mb")
        if memory_limit_mb is not None:
            limit_memory(memory_limit_mb)
        library = library_from_json(fields.pop("library", None))
        send(codec.encode_json(_complete(**fields) if library is None else _ask_library(library, **fields)))
        # The server reads nothing after the reply; threads and exit handlers of the model may still log.
        logging.getLogger().handlers.clear()
        if library is not None:
            # Threads of the library may still run, which its exit handlers do not expect.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _ask_library(
    library: Library, config: dict[str, Any], directory: str, file_name: str, has_gpus: bool
) -> dict[str, Any]:
    from conch.workers.host.native_completion import complete_with_library  # not needed by Python models

    try:
        return {"config": complete_with_library(config, Path(directory), library, has_gpus)}
    except ConchError as error:
        return {"code": error.code, "message": error.message}


def _complete(config: dict[str, Any], directory: str, file_name: str) -> dict[str, Any]:
    try:
        _, model_class = load_code(config.get("name", ""), Path(directory), file_name)
        return {"config": auto_complete(model_class, config)}
    except ConchError as error:
        return {"code": error.code, "message": error.message}
