"""Saved state of residency for restarts: measured sizes, and the models that were in memory.

One JSON file in the state directory. A file that can't be read is logged and ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch_control.state_files import TEMPORARY, make_state_directory, write_state_file
from conch_residency.segments import Room

log = logging.getLogger(__name__)

FORMAT = 1
_FILE = "models.json"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model that was measured.

    Attributes:
        digest: Digest of its files.
        size: Its memory.
        load_ns: Duration of its last load; 0 if unknown.
    """

    digest: int
    size: Room
    load_ns: int


@dataclass(frozen=True, slots=True)
class SavedResidency:
    """All that is kept.

    Attributes:
        models: The measured models.
        resident: Models that were in memory; the last to be evicted is first.
    """

    models: Mapping[str, SavedModel] = field(default_factory=dict)
    resident: tuple[str, ...] = ()


class ResidencyFile:
    """The file of one server. Not thread-safe.

    Args:
        directory: Directory of the file.
        gpus: GPUs with a budget, in the order of `Room.gpus`.

    Raises:
        InvalidArgumentError: The directory can't be made or read.
    """

    def __init__(self, directory: Path, gpus: tuple[int, ...] = ()) -> None:
        make_state_directory(directory)
        self._path = directory / _FILE
        self._gpus = gpus

    def read(self) -> SavedResidency:
        """Reads the saved state of the last run; empty without a file."""
        self._path.with_name(_FILE + TEMPORARY).unlink(missing_ok=True)
        try:
            return self._decoded(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return SavedResidency()
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is no state of residency and is ignored: %s", self._path, error)
            return SavedResidency()

    def write(self, saved: SavedResidency) -> None:
        """Replaces the file; logs an error if it can't be written."""
        models = {
            name: [each.digest, each.size.bytes, each.load_ns, self._by_device(each.size)]
            for name, each in saved.models.items()
        }
        content = {"format": FORMAT, "models": models, "resident": saved.resident}
        try:
            write_state_file(self._path, json.dumps(content, separators=(",", ":")))
        except OSError as error:
            log.error("the state of residency can't be written: %s", error)

    def _by_device(self, size: Room) -> dict[str, int]:
        return {str(gpu): taken for gpu, taken in zip(self._gpus, size.gpus, strict=False) if taken}

    def _decoded(self, content: Any) -> SavedResidency:
        """Raises ValueError: something is wrong."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        models, resident = content.get("models"), content.get("resident")
        if not isinstance(models, dict) or not isinstance(resident, list):
            raise ValueError("it lacks 'models' or 'resident'")
        if not all(isinstance(name, str) for name in resident):
            raise ValueError("'resident' is no list of names")
        return SavedResidency(
            {name: self._model(name, each) for name, each in models.items()}, tuple(resident)
        )

    def _model(self, name: str, fields: Any) -> SavedModel:
        match fields:
            case [int(digest), int(size), int(load_ns), dict(gpus)] if min(digest, size, load_ns) >= 0:
                taken = tuple(gpus.get(str(gpu), 0) for gpu in self._gpus)
                if all(isinstance(each, int) and each >= 0 for each in taken):
                    return SavedModel(digest, Room(size, 1, taken), load_ns)
        raise ValueError(f"what it has of model '{name}' is malformed")
