"""What tells requests with different answers apart.

Unlike Triton's key, which has the names and bytes of the inputs only, this one has everything a model can
see of a request but its id, its timeout and its priority: shapes (the same bytes as [2, 3] and as [3, 2] are
two requests), datatypes, custom parameters, and the outputs asked for. And it tells loads of a model apart,
so that a reload is not answered with what its predecessor said.

The hash is a cryptographic one. Clients choose the inputs, so with any other hash one of them could
make two requests with the same key, and have the answer to the first given to somebody who sends the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec
from conch.core.tensor import Buffer

_FORMAT = 1
"""Goes up whenever keys or entries change their meaning: caches may outlive this version."""

ORDER = "conch_cache"
"""The request parameter that says how a request uses the cache; no part of the key."""


class Hash(Protocol):
    """A hash object as those of `hashlib` are."""

    def update(self, data: Buffer, /) -> Any:
        """Adds data."""

    def digest(self) -> bytes:
        """The digest of all data so far."""

    def copy(self) -> Hash:
        """One more that has the same data so far."""


NewHash = Callable[[], Hash]
"""Makes a cryptographic hash with at least 32 bytes."""

Identity = bytes | Callable[[], bytes]
"""What is the same for loads of a model that give the same answers, and for no others.

A function where that can change during a load: an ensemble's answers are those of whatever models it
consists of at the moment. It must not take long.
"""


class KeyMaker:
    """Makes the keys of one load of one model version.

    Args:
        spec: The model version.
        identity: What tells this load from others.
        new_hash: Makes a hash object.
    """

    def __init__(self, spec: ModelSpec, identity: Identity, new_hash: NewHash) -> None:
        self._all = frozenset(tensor.name for tensor in spec.outputs)
        self._changing = None if isinstance(identity, bytes) else identity
        self._start = new_hash()
        fixed = None if self._changing else identity
        self._start.update(repr((_FORMAT, spec.name, spec.version, fixed)).encode())

    def __call__(self, request: InferenceRequest) -> bytes:
        """The key of a request; it need not have been checked: only requests that pass get an entry."""
        inputs = request.inputs
        tensors = [(name, inputs[name]) for name in sorted(inputs)]
        requested: list[str] | None = None
        if request.requested is not None and self._all != set(request.requested):
            requested = sorted(request.requested)
        head = (
            [(name, tensor.datatype, tensor.shape, tensor.nbytes) for name, tensor in tensors],
            requested,
            sorted(request.classes.items()) if request.classes else None,
            self._parameters(request) if request.parameters else None,
            # Of no meaning to a model without sequences, but there to be seen.
            (request.correlation_id, request.sequence_start, request.sequence_end),
            self._changing and self._changing(),
        )
        # Python's text of such a value is the text of no other one, and it says how long the data are.
        digest = self._start.copy()
        digest.update(repr(head).encode())
        for _, tensor in tensors:
            digest.update(tensor.data)
        return digest.digest()

    def _parameters(self, request: InferenceRequest) -> list[tuple[str, object]] | None:
        assert request.parameters is not None
        return sorted(item for item in request.parameters.items() if item[0] != ORDER) or None
