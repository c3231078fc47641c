"""A request as bound functions see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conch.core.tensor import Array


class Request(Mapping[str, Array]):
    """The inputs of one request by name, and what else it came with.

    The arrays may be the memory of the client's message, so they can't be written to. Strings come as object
    arrays of `bytes`. Optional inputs that were left out are absent.

    Attributes:
        parameters: What the client gave besides tensors.
        id: The client's id of the request, or empty.
        rows: How many rows it has; None for models without a batch dimension.

    Args:
        inputs: The inputs.
        parameters: What the client gave besides.
        id: The client's id of the request.
        rows: How many rows it has; None for models without a batch dimension.
    """

    __slots__ = ("_inputs", "id", "parameters", "rows")

    def __init__(
        self,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Any] | None = None,
        id: str = "",
        rows: int | None = None,
    ) -> None:
        self._inputs = dict(inputs)
        self.parameters: Mapping[str, Any] = {} if parameters is None else parameters
        self.id = id
        self.rows = rows

    def __getitem__(self, name: str) -> Array:
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def with_inputs(self, inputs: Mapping[str, Array]) -> Request:
        """The same request with other inputs."""
        return Request(inputs, self.parameters, self.id, self.rows)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name}: {array.dtype}{list(array.shape)}" for name, array in self.items())
        return f"Request({tensors})"
