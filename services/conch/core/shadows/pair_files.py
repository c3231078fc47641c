"""Writes the tensors of shadow pairs to files, for `--rollout-capture-directory`.

A file is numpy's ``.npz``, readable by the server's user only. Strings are in the protocol's encoding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import numpy as np

from conch.core.tensor import Tensor

log = logging.getLogger(__name__)


class PairFiles:
    """The files of one shadow.

    Args:
        directory: Where they are; made if it is missing.
        prefix: Beginning of their names.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory
        self._prefix = prefix
        self._number = count(1)

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Writes a pair; returns the file's name, empty if it can't be written."""
        name = f"{self._prefix}-{next(self._number)}.npz"
        arrays = {
            key: np.frombuffer(tensor.data, np.uint8)
            if tensor.datatype in ("BYTES", "BF16")
            else tensor.numpy()
            for key, tensor in tensors.items()
        }
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with open(os.open(self._directory / name, flags, 0o600), "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
        except OSError as error:
            log.warning("the tensors of a shadow pair can't be written to '%s': %s", name, error.strerror)
            return ""
        return name

    def remove(self, name: str) -> None:
        """Removes a file; no name means none."""
        if name:
            (self._directory / name).unlink(missing_ok=True)
