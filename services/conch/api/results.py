"""What a request gives where it is run without a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.core.tensor import Array


class Result(dict[str, Array]):
    """The outputs of one response by name.

    Attributes:
        parameters: What the model said besides.
    """

    def __init__(self, outputs: Mapping[str, Array], parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(outputs)
        self.parameters: Mapping[str, Any] = {} if parameters is None else parameters
