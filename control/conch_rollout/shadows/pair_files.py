"""Writes the tensors of shadow pairs to files, for `--rollout-capture-directory`.

A file is numpy's ``.npz``, readable by the server's user only. Strings, BF16 and malformed tensors are in the
protocol's encoding.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import numpy as np

from conch.core.errors import ConchError
from conch.core.tensor import Array, Tensor

log = logging.getLogger(__name__)

_FOREIGN = re.compile(r"[^A-Za-z0-9_.-]")


class PairFiles:
    """The files of one shadow.

    Args:
        directory: Directory of the files; made if it is missing.
        prefix: Beginning of their names, the same for one rollout.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory
        self._prefix = _FOREIGN.sub("_", prefix)  # identifiers of models may have slashes
        self._number = count(1)

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Writes a pair; returns the file's name, empty if it can't be written."""
        name = f"{self._prefix}-{next(self._number)}.npz"
        path = self._directory / name
        arrays = {key: _array(tensor) for key, tensor in tensors.items()}
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # of the same rollout, before a restart
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
        except OSError as error:
            log.warning("the tensors of a shadow pair can't be written to '%s': %s", path, error.strerror)
            self.remove(name)
            return ""
        return name

    def remove(self, name: str) -> None:
        """Removes a file; no name means none."""
        if name:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("'%s' can't be removed: %s", self._directory / name, error.strerror)


def _array(tensor: Tensor) -> Array:
    try:
        if tensor.datatype not in ("BYTES", "BF16"):
            return tensor.numpy()
    except (ConchError, ValueError):
        pass
    return np.frombuffer(tensor.data, np.uint8)
