"""A process that only asks a model's `auto_complete_config`: ``complete.py FD PATH...``.

It reads one JSON object from a socket, up to its end, and answers with one.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    """Answers the question that comes over the socket with the given number."""
    sys.path.remove(str(Path(__file__).parent))
    sys.path += [path for path in arguments[1:] if path not in sys.path]
    from conch.workers.host.parent import end_with_parent

    end_with_parent()
    with socket.socket(fileno=int(arguments[0])) as server:
        server.set_inheritable(False)
        with server.makefile("rb") as question:
            asked = json.loads(question.read())
        server.sendall(json.dumps(_complete(**asked)).encode())


def _complete(config: dict[str, Any], directory: str, file_name: str) -> dict[str, Any]:
    from conch.backends.python.config import auto_complete
    from conch.backends.python.instance import load_code
    from conch.core.errors import ConchError

    try:
        code = load_code(config.get("name", ""), Path(directory), file_name)
        return {"config": auto_complete(code.module.TritonPythonModel, config)}
    except ConchError as error:
        return {"code": error.code, "message": error.message}


if __name__ == "__main__":
    main(sys.argv[1:])
