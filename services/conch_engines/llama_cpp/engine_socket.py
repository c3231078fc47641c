"""The engine's own routes on a Unix socket: tokens of texts, and facts of the model.

Calls of the package itself have no tokenizer. The socket is in a directory that only its owner may enter.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnavailableError


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


class EngineSocket:
    """Calls the engine's routes; any thread, one connection a call.

    Args:
        path: The socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def facts(self) -> Any:
        """The engine's facts of its model, once its loop runs: closed before that, an engine never ends."""
        self.call("/slots")  # the loop answers
        (found,) = self.call("/v1/models")["data"]
        return found

    def call(self, route: str, body: Any = None) -> Any:
        """The answer of a route.

        Raises:
            InvalidArgumentError: The engine refuses the call.
            UnavailableError: The engine does not answer.
        """
        connection = _UnixConnection(self._path)
        try:
            method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, route, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise UnavailableError(f"the engine does not answer {route}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise InvalidArgumentError(f"the engine refuses {route}: {found['error']['message']}")
        return found
