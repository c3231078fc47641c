"""SageMaker's stateful sessions as sequences: a session's id is the correlation id of its requests.

A session begins with ``NEW_SESSION`` in place of its id. Its first inference request starts the sequence; one
with ``sequence_end``, or a request to close it, ends both.

Owns: the open sessions. Threads and locks: any thread, as large bodies are decoded in a pool; one lock.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from conch.core.errors import InvalidArgumentError, ResourceExhaustedError
from conch.core.request import InferenceRequest
from conch.frontends.http.http_exchange import HttpExchange

SESSION = b"x-amzn-sagemaker-session-id"
NEW = "NEW_SESSION"
NEW_HEADER = b"x-amzn-sagemaker-new-session-id"
CLOSED_HEADER = b"x-amzn-sagemaker-closed-session-id"
_MOST_SESSIONS = 65_536


@dataclass(slots=True)
class _Session:
    ends: float
    started: bool = False
    model: str = ""


class SageMakerSessions:
    """The sessions of one endpoint.

    Args:
        lifetime_s: Seconds after which a session ends.
        clock: Monotonic seconds.
        now: The time of day.
    """

    def __init__(
        self,
        lifetime_s: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}  # by id, oldest first

    def open(self, model: str = "") -> tuple[str, bytes]:
        """Opens a session; returns its id and the value of `NEW_HEADER`.

        Args:
            model: Model of the inference that opens it; empty if a message of its own does.

        Raises:
            ResourceExhaustedError: There are too many.
        """
        name = str(uuid.uuid4())
        now = self._clock()
        with self._lock:
            for old in [each for each, session in self._sessions.items() if session.ends <= now]:
                del self._sessions[old]
            if len(self._sessions) >= _MOST_SESSIONS:
                raise ResourceExhaustedError(
                    f"there are {_MOST_SESSIONS} open sessions, and no more are opened"
                )
            self._sessions[name] = _Session(now + self._lifetime_s, bool(model), model)
        ends = self._now() + timedelta(seconds=self._lifetime_s)
        return name, f"{name}; Expires={ends:%Y-%m-%dT%H:%M:%SZ}".encode()

    def use(self, name: str, model: str) -> bool:
        """Uses a session for an inference with a model; returns whether that is its first.

        Raises:
            InvalidArgumentError: There is no such session.
        """
        with self._lock:
            session = self._session(name)
            first, session.started = not session.started, True
            session.model = model
        return first

    def close(self, name: str) -> str:
        """Closes a session; returns the model whose sequence it is, or an empty text.

        Raises:
            InvalidArgumentError: There is no such session.
        """
        with self._lock:
            model = self._session(name).model
            del self._sessions[name]
        return model

    def prepare(self, request: InferenceRequest, exchange: HttpExchange) -> None:
        """Makes a decoded request one of its session's sequence.

        Raises:
            InvalidArgumentError: There is no such session, or the request names a sequence itself.
        """
        name = exchange.header(SESSION.decode())
        if not name:
            return
        if request.correlation_id:
            raise InvalidArgumentError(
                f"{request.log_prefix}a request of a session can't have a 'sequence_id': the session is its "
                f"sequence"
            )
        headers = exchange.extra_headers = list(exchange.extra_headers or ())
        if name == NEW:
            name, value = self.open(request.model_name)
            request.sequence_start = True
            headers.append((NEW_HEADER, value))
        elif self.use(name, request.model_name):
            request.sequence_start = True
        request.correlation_id = name
        if request.sequence_end:
            self.close(name)
            headers.append((CLOSED_HEADER, name.encode()))

    def failed(self, exchange: HttpExchange) -> None:
        """Takes back a session that a failed request has opened."""
        kept = []
        for name, value in exchange.extra_headers or ():
            if name != NEW_HEADER:
                kept.append((name, value))
                continue
            with self._lock:
                self._sessions.pop(value.partition(b";")[0].decode(), None)
        exchange.extra_headers = kept

    def _session(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None or session.ends <= self._clock():
            raise InvalidArgumentError(f"there is no session '{name}': it has ended, or never began")
        return session
