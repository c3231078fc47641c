"""Which model a bound function is run for: what decorators and functions may want to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The model and the instance that a function is called for.

    Attributes:
        name: The model's name.
        version: Its version.
        instance: Name of the instance: each function of a list is one.
        inputs: Names of its inputs, in the order of their binding.
        outputs: Names of its outputs, in the order of their binding.
        max_batch_size: Most rows of a batch; 0 without a batch dimension.
        preferred_batch_sizes: Sizes that the batcher prefers.
        parameters: The model's parameters.
    """

    name: str
    version: int
    instance: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    max_batch_size: int
    preferred_batch_sizes: Sequence[int] = ()
    parameters: tuple[tuple[str, str], ...] = ()


_current: ContextVar[ModelContext | None] = ContextVar("conch_model_context", default=None)


def model_context() -> ModelContext:
    """The model that the calling function is run for.

    Raises:
        RuntimeError: It is not called by a server.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError("there is no model here: model_context() is for functions that a server calls")
    return context


@contextmanager
def running_for(context: ModelContext) -> Iterator[None]:
    """Has `model_context` give a context on this thread meanwhile."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
