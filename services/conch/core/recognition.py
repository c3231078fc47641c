"""Recognition of requests that repeat, and bounded tables for what is derived from them.

A client's requests mostly differ only in their id and in their tensors' bytes. A front end keeps a
`RequestTemplate` under the bytes that say all the rest, and gives it as `signature` to every request with
these bytes. The validator keeps by the signature what it has found: that the request fits the model, its
batch size, its batch key. Encoders and workers' connections keep what they derive from names, datatypes and
shapes in the same kind of table.

Threads and locks: none; updates of a table are atomic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from conch.core.compiled import mypyc_attr
from conch.core.request import InferenceRequest

K = TypeVar("K")
V = TypeVar("V")

MOST_ENTRIES = 4096
"""Entries of a table, unless it sets another limit."""

_SETTINGS = ("classes", "empty_final", "parameters", "priority", "timeout_us")
"""Attributes of requests that templates hold if they are set."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Table(dict[K, V]):
    """A dict that `keep` empties when it is full: keys that never repeat must not fill the memory.

    Args:
        most: Limit of entries.
    """

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: K, value: V) -> V:
        """Adds an entry; returns the value."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestTemplate:
    """Common parts of requests that differ only in id and tensor bytes; compared by identity.

    Args:
        inputs: Name, datatype and shape of each input.
        request: A request with all the rest.

    Attributes:
        inputs: Name, datatype and shape of each input.
        requested: Names of the requested outputs; None for all.
        settings: Attributes of the requests that differ from the defaults.
    """

    __slots__ = ("inputs", "requested", "settings")

    def __init__(self, inputs: Iterable[tuple[str, str, tuple[int, ...]]], request: InferenceRequest) -> None:
        self.inputs = tuple(inputs)
        self.requested = request.requested
        self.settings: tuple[tuple[str, object], ...] = tuple(
            [(name, value) for name in _SETTINGS if (value := getattr(request, name)) not in (None, 0, False)]
        )
