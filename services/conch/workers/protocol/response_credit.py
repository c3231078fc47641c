"""Flow control of decoupled models: what a response costs, and how much a worker may send unasked.

A response takes units. For each request a worker may send `WINDOW` of them, and more as the server delivers:
it grants delivered units again with a message CREDIT. So a model that is faster than its client waits, and
what the server holds of its responses stays bounded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from conch.core.tensor import Tensor
from conch.workers.protocol.channel import MOST_INLINE, WireError

WINDOW = 96
"""Units that a worker may send for one request of a decoupled model before the server grants more."""

CREDIT_AT = WINDOW // 4
"""Units after whose delivery the server grants them again."""

_UNIT_BYTES = 64 * 1024
_BLOCK_UNITS = 12
"""At most eight blocks of a request are in flight at a time; each takes a descriptor."""

_CREDIT = struct.Struct("<I")


def units(tensors: Sequence[Tensor]) -> int:
    """Units that a response takes: one if it is small, more if it needs a block."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
    return 1 if nbytes <= MOST_INLINE else _BLOCK_UNITS + nbytes // _UNIT_BYTES


def encode_credit(units: int) -> bytes:
    """Encodes the units that the worker may send in addition."""
    return _CREDIT.pack(units)


def decode_credit(fields: memoryview) -> int:
    """The units that the worker may send in addition.

    Raises:
        WireError: The fields are malformed.
    """
    if len(fields) != _CREDIT.size:
        raise WireError(f"a credit has {len(fields)} bytes")
    return int(_CREDIT.unpack(fields)[0])
