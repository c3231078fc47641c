"""HTTP requests to a registry, on the threads that call: connections that are kept, bodies that are streamed.

Owns: the connections. Locks: one for their lists; `abort` ends requests of other threads.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from conch_mlflow.locations import MlflowLocation
from conch_mlflow.registry import MalformedError
from conch_stores.stores import StoreBusyError

MOST_JSON = 16 << 20
"""Largest answer that is not streamed, such as a page of a listing, in bytes."""
_MOST_KEPT = 8
_CHUNK = 1 << 20
_RANGE = re.compile(r"bytes (\d+)-")
_LONGEST_TEXT = 300


def decoded(content: bytes) -> Any:
    """Decodes JSON of any length. Raises ValueError: it is none."""
    # The decoder holds the GIL. A call of a Python function for each object gives other threads their turns.
    return json.loads(content, object_hook=lambda found: found)


class RegistryHttp:
    """HTTP to one server.

    Args:
        location: Its location.
        headers: Sent with each request.
        context: For TLS; None for none.
        silence_s: Longest silence of the server.
    """

    def __init__(
        self,
        location: MlflowLocation,
        headers: Mapping[str, str],
        context: ssl.SSLContext | None,
        silence_s: float,
    ) -> None:
        self._location = location
        self._headers = {"User-Agent": "conch", "Accept-Encoding": "identity", **headers}
        self._context = context
        self._silence_s = silence_s
        self._lock = threading.Lock()  # guards the next attributes
        self._kept: list[http.client.HTTPConnection] = []
        self._used: set[http.client.HTTPConnection] = set()
        self._aborted = False

    def json(self, target: str) -> dict[str, Any]:
        """Gets a JSON object.

        Raises:
            FileNotFoundError, PermissionError: As the server says.
            StoreBusyError: A retry makes sense.
            OSError: Other failures.
        """
        with self.body(target) as body:
            content = body.read(MOST_JSON + 1)
        if len(content) > MOST_JSON:
            raise MalformedError(
                f"its answer to {target} has more than {MOST_JSON} bytes, the most that is taken of one page"
            )
        try:
            found = decoded(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise MalformedError(f"it does not answer {target} with JSON, as an MLflow server does")
        return found

    def body(self, target: str, start: int = 0, etag: str = "") -> Body:
        """Opens a body at a position; the server skips to it only if the etag is still the content's."""
        headers = dict(self._headers)
        if start:
            headers["Range"] = f"bytes={start}-"
            if etag and not etag.startswith("W/"):
                headers["If-Range"] = etag
        connection, response = self._ask(target, headers)
        body = Body(self, connection, response)
        try:
            if response.status not in (200, 206):
                raise _failure(response.status, response.getheader("Location", ""), body.read(_CHUNK))
            if response.status == 206:
                found = _RANGE.match(response.getheader("Content-Range", ""))
                if found is None or int(found[1]) != start:
                    raise MalformedError(f"it answers {target} with another range than was asked for")
                body.position = start
            else:  # it ignores ranges, or the content is another one
                body.skip(start)
        except BaseException:
            body.close()
            raise
        return body

    def abort(self) -> None:
        """Ends all requests, and refuses new ones."""
        with self._lock:
            self._aborted = True
            kept, self._kept = self._kept, []
            used = list(self._used)
        for connection in kept:
            connection.close()
        for connection in used:  # closed by the thread that uses it
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of sockets and of HTTP into those of stores."""
        try:
            yield
        except TimeoutError:
            raise StoreBusyError(f"no answer within {self._silence_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise OSError(f"its certificate is refused: {error.verify_message}") from None
        except StoreBusyError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreBusyError(str(error) or type(error).__name__) from None

    def give_back(self, connection: http.client.HTTPConnection, reusable: bool) -> None:
        """Takes a connection back."""
        with self._lock:
            self._used.discard(connection)
            if reusable and not self._aborted and len(self._kept) < _MOST_KEPT:
                self._kept.append(connection)
                return
        connection.close()

    def _ask(
        self, target: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            connection, kept = self._connection()
            try:
                with self.errors():
                    try:
                        connection.request("GET", f"{self._location.prefix}/{target}", headers=dict(headers))
                        return connection, connection.getresponse()
                    except ConnectionError:
                        if not kept:
                            raise
                        # The server has closed an idle connection: the next one, or a new one.
                        self.give_back(connection, False)
            except BaseException:
                self.give_back(connection, False)
                raise

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._aborted:
                raise StoreBusyError("the connection has been closed")
            kept = bool(self._kept)
            connection = self._kept.pop() if kept else self._new()
            self._used.add(connection)
        return connection, kept

    def _new(self) -> http.client.HTTPConnection:
        place = self._location
        if self._context is None:
            return http.client.HTTPConnection(place.host, place.port, timeout=self._silence_s)
        return http.client.HTTPSConnection(
            place.host, place.port, timeout=self._silence_s, context=self._context
        )


class Body:
    """A body that is read; used on one thread at a time.

    Attributes:
        position: Bytes before what is read next.
        etag: The content's.
    """

    def __init__(
        self,
        http_client: RegistryHttp,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
    ) -> None:
        self._http = http_client
        self._connection = connection
        self._response = response
        self._closed = False
        self.position = 0
        self.etag = response.getheader("ETag", "")

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ended(self) -> bool:
        """True if all of it was read."""
        return self._response.isclosed()

    def read(self, size: int) -> bytes:
        """Reads so many bytes, or the rest. Raises StoreBusyError: the connection ends before."""
        parts: list[bytes] = []
        with self._http.errors():
            while size > 0:
                part = self._response.read(min(size, _CHUNK))
                if not part:
                    if self._response.length:
                        raise StoreBusyError("the connection ended within an answer")
                    break
                parts.append(part)
                size -= len(part)
                self.position += len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Reads past so many bytes."""
        while size > 0 and (part := self.read(min(size, _CHUNK))):
            size -= len(part)

    def close(self) -> None:
        """Returns the connection if all was read, else closes it."""
        if not self._closed:
            self._closed = True
            reusable = self._response.isclosed() and not self._response.will_close
            self._response.close()
            self._http.give_back(self._connection, reusable)


def _failure(status: int, elsewhere: str, content: bytes) -> OSError:
    """The error for an answer that is none."""
    text = _message(content)
    if status in (401, 407):
        return PermissionError(
            "it refuses the credentials; set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD"
        )
    if status == 403:
        advice = "; start it with --allowed-hosts and this host" if "Host header" in text else ""
        return PermissionError(f"it answers 403: {text}{advice}")
    if status == 404:
        return FileNotFoundError(f"it answers 404: {text}")
    if status == 429 or status >= 500:
        return StoreBusyError(f"it answers {status}: {text}")
    if elsewhere:
        return OSError(f"it redirects to '{elsewhere}'; write the location of the MLflow server itself")
    return OSError(f"it answers {status}: {text}")


def _message(content: bytes) -> str:
    try:
        found = json.loads(content)
        text = str(found["message"])
    except (ValueError, KeyError, TypeError):
        text = content.decode(errors="replace")
    line = " ".join(text.split())
    return line[:_LONGEST_TEXT] if line.isprintable() else repr(line[:_LONGEST_TEXT])
