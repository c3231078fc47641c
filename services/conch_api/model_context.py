"""The model that a bound function is running for, as `conch.model_context` returns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The model and instance that a function runs for.

    Attributes:
        name: The model's name.
        version: Its version.
        instance: The instance's name; each function of a list is an instance.
        inputs: Names of its inputs, in order.
        outputs: Names of its outputs, in order.
        max_batch_size: Maximum rows of a batch; 0 without a batch dimension.
        preferred_batch_sizes: Preferred sizes of the batcher.
        parameters: The model's parameters.
        input_datatypes: Protocol datatypes of its inputs.
        input_dims: Dims of its inputs without the batch dimension; -1 for a variable one.
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
    """Returns the model that the calling function runs for.

    Raises:
        RuntimeError: The function is not called by a server.
    """
    context = current_context()
    if context is None:
        raise RuntimeError("there is no model here: model_context() is for functions that a server calls")
    return context


def current_context() -> ModelContext | None:
    """The current context; None outside a server."""
    return _current.get()


@contextmanager
def use_context(context: ModelContext) -> Iterator[None]:
    """Sets the context for this thread during the block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
