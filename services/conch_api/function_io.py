"""`conch.Request` and `conch.Result`: inputs of a bound function, outputs of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from conch.core.tensor import Array


class Request(Mapping[str, Array]):
    """The inputs of one request by name, and its metadata.

    Arrays are writable and belong to the function: an input in the memory of the client's message is copied
    on first access. Strings are object arrays of `bytes`. Optional inputs that were left out are absent.

    Attributes:
        parameters: The request parameters.
        id: The client's request id, or empty.
        rows: Number of rows; None for models without a batch dimension.

    Args:
        inputs: The inputs.
        parameters: The request parameters.
        id: The client's request id.
        rows: Number of rows; None for models without a batch dimension.
        on_copy: Called with the size in bytes of each copied input.
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
        """An input for reading only, without a copy: it may be the client's memory."""
        return self._inputs[name]

    def with_more(self, inputs: Mapping[str, Array]) -> Request:
        """The same request with additional inputs."""
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
        parameters: The response parameters.
    """

    def __init__(self, outputs: Mapping[str, Array], parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(outputs)
        self.parameters: Mapping[str, Any] = {} if parameters is None else parameters
