"""A request as bound functions see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from conch.core.tensor import Array


class Request(Mapping[str, Array]):
    """The inputs of one request by name, and what else it came with.

    The arrays can be written to and are the function's own: one that is the memory of the client's message is
    copied when it is first looked at. Strings come as object arrays of `bytes`. Optional inputs that were
    left out are absent.

    Attributes:
        parameters: What the client gave besides tensors.
        id: The client's id of the request, or empty.
        rows: How many rows it has; None for models without a batch dimension.

    Args:
        inputs: The inputs.
        parameters: What the client gave besides.
        id: The client's id of the request.
        rows: How many rows it has; None for models without a batch dimension.
        on_copy: Told how many bytes a copy of an input has.
    """

    __slots__ = ("_inputs", "_on_copy", "id", "parameters", "rows")

    def __init__(
        self,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Any] | None = None,
        id: str = "",
        rows: int | None = None,
        on_copy: Callable[[int], None] | None = None,
    ) -> None:
        self._inputs = dict(inputs)
        self._on_copy = on_copy
        self.parameters: Mapping[str, Any] = {} if parameters is None else parameters
        self.id = id
        self.rows = rows

    def __getitem__(self, name: str) -> Array:
        array = self._inputs[name]
        if not array.flags.writeable:
            array = self._inputs[name] = array.copy()
            if self._on_copy is not None:
                self._on_copy(array.nbytes)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def shared(self, name: str) -> Array:
        """An input to be read only, as it may be the memory of the client's message: there is no copy."""
        return self._inputs[name]

    def with_more(self, inputs: Mapping[str, Array]) -> Request:
        """The same request with further inputs."""
        return Request({**self._inputs, **inputs}, self.parameters, self.id, self.rows, self._on_copy)

    def with_inputs(self, inputs: Mapping[str, Array]) -> Request:
        """The same request with other inputs."""
        return Request(inputs, self.parameters, self.id, self.rows, self._on_copy)

    def __repr__(self) -> str:
        arrays = self._inputs.items()
        tensors = ", ".join(f"{name}: {array.dtype}{list(array.shape)}" for name, array in arrays)
        return f"Request({tensors})"


class Result(dict[str, Array]):
    """The outputs of one response by name.

    Attributes:
        parameters: What the model said besides.
    """

    def __init__(self, outputs: Mapping[str, Array], parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(outputs)
        self.parameters: Mapping[str, Any] = {} if parameters is None else parameters
