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
        input_datatypes: Datatypes of its inputs, in the protocol's names.
        input_dims: Dims of its inputs, without the batch dimension; -1 for one that varies.
    """

    name: str
    version: int
    instance: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    max_batch_size: int
    preferred_batch_sizes: Sequence[int] = ()
    parameters: tuple[tuple[str, str], ...] = ()
    input_datatypes: Sequence[str] = ()
    input_dims: Sequence[tuple[int, ...]] = ()


_current: ContextVar[ModelContext | None] = ContextVar("conch_model_context", default=None)


def model_context() -> ModelContext:
    """The model that the calling function is run for.

    Raises:
        RuntimeError: It is not called by a server.
    """
    context = current_context()
    if context is None:
        raise RuntimeError("there is no model here: model_context() is for functions that a server calls")
    return context


def current_context() -> ModelContext | None:
    """The same; None where no server calls."""
    return _current.get()


@contextmanager
def use_context(context: ModelContext) -> Iterator[None]:
    """Has `model_context` give a context on this thread meanwhile."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
