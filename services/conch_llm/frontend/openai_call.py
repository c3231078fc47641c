"""One request to one of OpenAI's routes: its id, its body, its response and what is counted of it."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.frontends.http.flow_control import MOST_CHUNKS, Body, TooManyChunksError
from conch.frontends.http.http_exchange import ClientDisconnectError, Headers, HttpExchange
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.json_body import JSON, parsed
from conch_llm.frontend.error_forms import OPENAI_ERRORS, ErrorForm
from conch_llm.frontend.large_bodies import QUICK_BYTES, quick_json, read_body
from conch_llm.frontend.llm_metrics import LlmMetrics
from conch_llm.frontend.openai_answers import encoded
from conch_llm.frontend.openai_errors import RequestError, TooLargeError

log = logging.getLogger(__name__)

T = TypeVar("T")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class OpenAiCall:
    """One request.

    Args:
        exchange: The request as HTTP has it.
        route: Name of its route, for metrics.
        metrics: Counts it.
        pools: Threads that parse large bodies.
        most_bytes: Largest body.
        errors: Form of its errors.

    Attributes:
        exchange: The request as HTTP has it.
        errors: Form of its errors.
        request_id: Its id, the client's if that has sent a usable one.
        model: The model's own name once it is found, for metrics.
        body: The body as received, once it is read.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        route: str,
        metrics: LlmMetrics,
        pools: Pools,
        most_bytes: int,
        errors: ErrorForm = OPENAI_ERRORS,
    ) -> None:
        self.exchange = exchange
        self.errors = errors
        self._route = route
        self.metrics = metrics
        self._pools = pools
        self._most_bytes = most_bytes
        given = exchange.header("x-request-id")
        self.request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        self.model = ""
        self.body = b""
        self._fields: Mapping[str, Any] = {}
        shown = self.request_id.encode()
        headers = [(name, shown) for name in errors.id_headers]
        exchange.extra_headers = [*(exchange.extra_headers or ()), *headers]

    async def run(self, work: Awaitable[None]) -> None:
        """Waits for what answers the request; sends its error if there is one."""
        try:
            await work
        except ClientDisconnectError:
            pass
        except ConchError as error:
            self.fail(error)
        except Exception as error:  # boundary: a handler
            exchange = self.exchange
            log.error("%s %s could not be answered", exchange.method, exchange.path, exc_info=error)
            self.fail(InternalError("the request could not be answered"))

    async def read(self) -> Mapping[str, Any]:
        """The body as a JSON object.

        Raises:
            ConchError: It is over the limit, or no JSON object.
            ClientDisconnectError: The client disconnected.
        """
        exchange, most = self.exchange, self._most_bytes
        if exchange.fields.get(b"content-encoding", b"identity") not in (b"identity", b""):
            raise InvalidArgumentError("Unsupported content-encoding, only 'identity' is supported.")
        if exchange.length is not None and exchange.length > most:
            raise self._too_large(exchange.length)
        await exchange.wait_body(most)
        if exchange.unread:
            if exchange.chunks > MOST_CHUNKS:
                raise TooManyChunksError
            raise self._too_large(exchange.size)
        given = exchange.take_body()
        found: Any
        if len(given) <= QUICK_BYTES:
            self.body = bytes(given)
            found = quick_json(self.body)
        else:
            self.body, found = await parsed(exchange, self._pools, read_body, given)
        if not isinstance(found, dict):
            raise RequestError("The body must be a JSON object", None, "json_invalid")
        self._fields = found
        return found

    async def run_long(self, work: Callable[..., T], *arguments: Any, more_bytes: int = 0) -> T:
        """Runs work whose time grows with the body: on a thread of the pool, unless the body is short.

        Args:
            work: The work.
            arguments: Its arguments.
            more_bytes: Bytes that it reads besides the body; both together have the limit of a body.

        Raises:
            ConchError: The work raises it, the client disconnected, or the server stops.
        """
        if len(self.body) + more_bytes > self._most_bytes:
            raise self._too_large(len(self.body) + more_bytes)
        if len(self.body) + more_bytes <= QUICK_BYTES:
            return work(*arguments)
        return await parsed(self.exchange, self._pools, work, *arguments)

    def respond(self, status: int, headers: Headers, body: Body = b"", closes: bool = False) -> None:
        """Sends a whole response, and counts it."""
        self.counted(status)
        self.exchange.respond(status, headers, body, closes)

    def reply(self, content: Any, status: int = 200) -> None:
        """Sends a whole response of JSON."""
        self.respond(status, [JSON], encoded(content))

    async def reply_with(self, make: Callable[[], bytes], size: int) -> None:
        """Sends a whole response of JSON that `make` encodes: on a thread of the pool if it is long.

        Args:
            make: Makes the body; calls `yield_gil` regularly.
            size: Its size, roughly.
        """
        if size <= QUICK_BYTES:
            body = make()
        else:
            body = await parsed(self.exchange, self._pools, make)
        self.respond(200, [JSON], body)

    def fail(self, error: ConchError) -> None:
        """Sends an error, unless the response has begun."""
        if not self.exchange.began:
            self.respond(*self.errors.reply(error, self.request_id, self._fields))

    def counted(self, status: int) -> None:
        """Counts the response."""
        self.metrics.answered(self._route, self.model, status)

    def _too_large(self, size: int) -> TooLargeError:
        return TooLargeError(
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of "
            f"{self._most_bytes} bytes. Use --http-max-input-size to increase the limit."
        )
