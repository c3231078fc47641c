"""A process that only asks a model's `auto_complete_config`, and ends with the answer.

It reads one JSON object from a socket, up to its end, and answers with one.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from conch.backends.python.config import auto_complete
from conch.backends.python.instance import load_code
from conch.core.errors import ConchError


def complete(descriptor: int) -> None:
    """Answers the question that comes over the socket with this number."""
    with socket.socket(fileno=descriptor) as server:
        server.set_inheritable(False)
        with server.makefile("rb") as question:
            asked = json.loads(question.read())
        server.sendall(json.dumps(_complete(**asked)).encode())


def _complete(config: dict[str, Any], directory: str, file_name: str) -> dict[str, Any]:
    try:
        code = load_code(config.get("name", ""), Path(directory), file_name)
        return {"config": auto_complete(code.module.TritonPythonModel, config)}
    except ConchError as error:
        return {"code": error.code, "message": error.message}
