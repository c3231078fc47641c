"""A model of a repository as the source: the file of its newest version, its warm-up data and labels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.core.errors import InvalidArgumentError
from conch.core.spec import WarmupInput
from conch.core.tensor import NUMPY_DTYPES
from conch_control.config.parse import read_config
from conch_control.config.warmup import read_warmup
from conch_tools.optimize.model_kinds import is_source
from conch_tools.optimize.sample_data import FEWEST

Array = npt.NDArray[Any]
_CONFIG = "config.pbtxt"
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Parts of a model's directory.

    Attributes:
        path: The model's file or folder.
        name: The model's name.
        samples: Warm-up data by input, repeated until there are enough rows; empty if it comes from no file.
        labels: File of the first output that has labels.
    """

    path: Path
    name: str
    samples: Mapping[str, Array]
    labels: Path | None


def read_served_model(directory: Path) -> ServedModel | None:
    """Reads a model's directory; None if it is none.

    Raises:
        ConchError: Its config is wrong, or it has no version with a model that can be converted.
    """
    if not (directory / _CONFIG).is_file():
        return None
    directory = Path(os.path.abspath(directory))
    config = read_config(directory / _CONFIG)
    versions = [each for each in directory.iterdir() if each.name.isdecimal() and each.is_dir()]
    if not versions:
        raise InvalidArgumentError(f"'{directory}' has no version")
    version = max(versions, key=lambda each: int(each.name))
    found = sorted(each for each in version.iterdir() if is_source(each))
    if config.default_model_filename:
        found = [version / config.default_model_filename]
    if len(found) != 1:
        raise InvalidArgumentError(
            f"'{version}' has {len(found)} files of models that can be converted; name one as the source"
        )
    rows: dict[str, list[Array]] = {}
    for sample in read_warmup(config, directory):
        if all(each.source == "FILE" for each in sample.inputs):
            for each in sample.inputs:
                rows.setdefault(each.name, []).append(_array(each))
    count = len(next(iter(rows.values()), []))
    samples = {
        name: np.stack([arrays[row % count] for row in range(max(count, FEWEST))])
        for name, arrays in rows.items()
    }
    labels = next((each.label_filename for each in config.output if each.label_filename), "")
    return ServedModel(
        found[0], config.name or directory.name, samples, directory / labels if labels else None
    )


def _array(given: WarmupInput) -> Array:
    if given.datatype != "BYTES":
        return np.frombuffer(given.data, NUMPY_DTYPES[given.datatype]).reshape(given.dims)
    texts, at = [], 0
    while at < len(given.data):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(given.data[at:start], "little")
        texts.append(given.data[start:at])
    return np.array(texts, "S").reshape(given.dims)
