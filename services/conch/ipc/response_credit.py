"""Flow control of decoupled models: what a response costs, and how much a worker may send unasked.

A response takes units. For each request a worker may send `WINDOW` of them, and more as its client reads: the
server then grants them again with a message CREDIT. So a model that is faster than its client waits, and what
the server holds of its responses stays bounded.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence

from conch.core.tensor import Tensor
from conch.ipc.channel import MOST_INLINE, WireError

WINDOW = 96
"""Units that a worker may send for one request of a decoupled model before the server grants more."""

CREDIT_AT = WINDOW // 4
"""Units after whose delivery the server grants them again, if the client keeps up."""

_UNIT_BYTES = 64 * 1024
_BLOCK_UNITS = 12
"""At most eight blocks of a request are in flight at a time; each takes a descriptor."""

_CREDIT = struct.Struct("<QI")


def units(tensors: Sequence[Tensor]) -> int:
    """Units that a response takes: one if it is small, more if it needs a block."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
    return 1 if nbytes <= MOST_INLINE else _BLOCK_UNITS + nbytes // _UNIT_BYTES


def encode_credit(granted: Iterable[tuple[int, int]]) -> bytes:
    """Encodes the units that the worker may send in addition: numbers of requests, and units of each."""
    return b"".join(itertools.starmap(_CREDIT.pack, granted))


def decode_credit(fields: memoryview) -> list[tuple[int, int]]:
    """The numbers of requests, and the units of each that the worker may send in addition.

    Raises:
        WireError: The fields are malformed.
    """
    if len(fields) % _CREDIT.size:
        raise WireError(f"credits have {len(fields)} bytes")
    return list(_CREDIT.iter_unpack(fields))
