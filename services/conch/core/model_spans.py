"""`span`: spans that model code makes around parts of its own work.

A span is recorded when it ends, by the `Watch` of the request that the code belongs to. Without a traced
request it costs one look at a context variable. No state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from numbers import Integral, Real
from random import SystemRandom
from types import TracebackType
from typing import Any, TypeVar

from conch.core.clock import monotonic_ns
from conch.core.current_span import CurrentSpan, current_span
from conch.core.errors import message_of
from conch.core.request import SpanRecord

_Function = TypeVar("_Function", bound=Callable[..., Any])
_bits = SystemRandom().getrandbits  # models may seed the generator of `random`, and workers are forked
_MOST_ATTRIBUTES = 128
"""Limit of attributes of one span; OpenTelemetry's default."""

_MOST_TEXT = 1024
_INT64 = 2**63


def span(name: str, /, **attributes: object) -> ModelSpan:
    """A span of the model's own, in the trace of the request that runs.

    ```python
    with conch.span("tokenize", texts=len(texts)) as span:
        tokens = tokenize(texts)
        span.set_attribute("tokens", len(tokens))


    @conch.span("rank")
    def rank(scores): ...
    ```

    It is a child of the span around it, or of the model's span in the trace; in a batch, in that of the first
    request that is traced. Without tracing in mode ``opentelemetry`` it does nothing.

    Args:
        name: Name of the work, the same for all requests.
        attributes: Texts, numbers and truth values; others are recorded as their texts.

    Raises:
        TypeError: It is put before a generator, whose work is not done when the call returns.
    """
    return ModelSpan(name, attributes)


class ModelSpan:
    """See `span`. Can be entered once, or decorate functions and coroutine functions."""

    __slots__ = ("_attributes", "_entered", "_name", "_parent", "_start_ns")

    def __init__(self, name: str, attributes: dict[str, object]) -> None:
        self._name = name
        self._attributes = attributes
        self._parent: CurrentSpan | None = None
        self._entered: CurrentSpan | None = None
        self._start_ns = 0

    def set_attribute(self, name: str, value: object) -> None:
        """Sets an attribute before the span ends."""
        if len(self._attributes) < _MOST_ATTRIBUTES or name in self._attributes:
            self._attributes[name] = value

    def __enter__(self) -> ModelSpan:
        if self._start_ns:
            raise RuntimeError(f"span '{self._name}' was entered before; make one for each use")
        self._start_ns = monotonic_ns()
        parent = self._parent = current_span()
        if parent is not None:
            self._entered = parent.child(f"{_bits(64) or 1:016x}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        parent, entered = self._parent, self._entered
        if parent is None or entered is None:
            return
        entered.leave()
        parent.watch.add_span(
            SpanRecord(
                self._name[:_MOST_TEXT],
                int(entered.span_id, 16),
                int(parent.span_id, 16),
                self._start_ns,
                monotonic_ns(),
                {name: _plain(value) for name, value in self._attributes.items()},
                "" if error is None else type(error).__name__,
                "" if error is None else message_of(error)[:_MOST_TEXT],
            )
        )

    def __call__(self, function: _Function) -> _Function:
        """Decorates a function: each call is a span."""
        name, attributes = self._name, self._attributes
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"span '{name}' can't decorate the generator {function.__name__}: use `with` within it"
            )
        wrapper: Any
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def wrapper(*args: Any, **keywords: Any) -> Any:
                with ModelSpan(name, dict(attributes)):
                    return await function(*args, **keywords)

        else:

            @wraps(function)
            def wrapper(*args: Any, **keywords: Any) -> Any:
                with ModelSpan(name, dict(attributes)):
                    return function(*args, **keywords)

        found: _Function = wrapper
        return found


def _plain(value: object) -> str | bool | int | float:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        number = int(value)
        return number if -_INT64 <= number < _INT64 else message_of(number)[:_MOST_TEXT]
    if isinstance(value, Real):
        return float(value)
    return message_of(value)[:_MOST_TEXT]
