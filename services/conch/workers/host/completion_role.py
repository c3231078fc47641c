"""A process that only asks a model's `auto_complete_config`, and ends with the answer.

It reads one JSON object from a socket, up to its end, and answers with lines that are one each: what is
logged meanwhile, as ``log``, and the answer.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from pathlib import Path
from typing import Any

from conch.backends.python.api.pb_model_config import auto_complete
from conch.backends.python.runtime.memory_limit import limit_memory
from conch.backends.python.runtime.python_instance import load_code
from conch.core.errors import ConchError
from conch.workers.protocol import wire
from conch.workers.protocol.worker_log import log_to_server


def complete(descriptor: int) -> None:
    """Answers the question that comes over the socket with this number."""
    with socket.socket(fileno=descriptor) as server:
        server.set_inheritable(False)
        with server.makefile("rb") as question:
            asked = json.loads(question.read())
        lock = threading.Lock()  # the model's threads log too

        def send(line: bytes) -> None:
            with lock:
                server.sendall(line + b"\n")

        log_to_server(lambda record: send(b'{"log":' + record + b"}"), asked.pop("level"))
        memory_limit_mb = asked.pop("memory_limit_mb")
        if memory_limit_mb is not None:
            limit_memory(memory_limit_mb)
        send(wire.encode_json(_complete(**asked)))
        # Nothing is read after the answer, whatever threads and exit handlers of the model go on to log.
        logging.getLogger().handlers.clear()


def _complete(config: dict[str, Any], directory: str, file_name: str) -> dict[str, Any]:
    try:
        code = load_code(config.get("name", ""), Path(directory), file_name)
        return {"config": auto_complete(code.module.TritonPythonModel, config)}
    except ConchError as error:
        return {"code": error.code, "message": error.message}
