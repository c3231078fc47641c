"""Digests of what a result depends on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt

_LENGTH = 32


def digest_of_facts(facts: Any) -> str:
    """Hash of an object of JSON; the order of members does not count."""
    text = json.dumps(facts, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def digest_of_array(array: npt.NDArray[Any]) -> str:
    """Hash of datatype, shape and values."""
    facts = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(facts + np.ascontiguousarray(array).tobytes()).hexdigest()[:_LENGTH]
