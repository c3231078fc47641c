"""Keys of cache entries, which differ for requests that may have different responses.

Triton's key has the names and bytes of the inputs. This one has all that a model can see of a request except
id, timeout and priority: shapes (equal bytes as [2, 3] and as [3, 2] are two requests), datatypes, custom
parameters and requested outputs. It also identifies the load of the model, so that a reload starts anew.

The hash is cryptographic. Clients choose the inputs: with another hash, one of them could create two requests
with the same key, and have the response to the first sent to a sender of the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec
from conch.core.tensor import Buffer

_FORMAT = 1
"""Increased when keys or entries change their meaning: caches may outlive this version."""

ORDER = "conch_cache"
"""The request parameter that controls the use of the cache; no part of the key."""


class Hash(Protocol):
    """A hash object like those of `hashlib`."""

    def update(self, data: Buffer, /) -> Any:
        """Adds data."""

    def digest(self) -> bytes:
        """The digest of all data so far."""

    def copy(self) -> Hash:
        """A copy with the same data."""


NewHash = Callable[[], Hash]
"""Creates a cryptographic hash of at least 32 bytes."""

Identity = bytes | Callable[[], bytes]
"""Equal for loads of a model that give the same responses, and for no others.

A function if that changes during a load: the responses of an ensemble depend on its current models. It must
be fast.
"""


class KeyMaker:
    """Makes the keys of one load of one model version, which `identity` distinguishes from others."""

    def __init__(self, spec: ModelSpec, identity: Identity, new_hash: NewHash) -> None:
        self._all = frozenset(tensor.name for tensor in spec.outputs)
        self._changing = None if isinstance(identity, bytes) else identity
        self._start = new_hash()
        fixed = None if self._changing else identity
        self._start.update(repr((_FORMAT, spec.name, spec.version, fixed)).encode())

    def __call__(self, request: InferenceRequest) -> bytes:
        """The key of a request, validated or not: only valid requests get an entry."""
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
            # Without meaning for a model without sequences, but visible to it.
            (request.correlation_id, request.sequence_start, request.sequence_end),
            self._changing and self._changing(),
        )
        # `repr` of such a value is unique, and contains the lengths of the data.
        digest = self._start.copy()
        digest.update(repr(head).encode())
        for _, tensor in tensors:
            digest.update(tensor.data)
        return digest.digest()

    def _parameters(self, request: InferenceRequest) -> list[tuple[str, object]] | None:
        assert request.parameters is not None
        return sorted(item for item in request.parameters.items() if item[0] != ORDER) or None
