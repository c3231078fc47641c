"""Loads damaged files of an engine: ``python -m tests.support.engines.mutations ENGINE FOLDER COUNT``.

In a process of its own, which a library may end, and which gets little more memory than it takes to import
all libraries. Prints a line before each file.
"""

from __future__ import annotations

import pickle
import resource
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import psutil
from tests.support.backend_harness import Harness
from tests.support.engines import FORMATS
from tests.support.engines.engine import sample_rows
from tests.support.engines.engine_models import spec_of, version_of

from conch.backends import load_backend
from conch.core.errors import ConchError

_MOST_MEMORY = 6 << 30  # PyTorch makes room for one text of up to 4 GiB before it reads it


class Payload:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._marker,)


def mutated(whole: bytes, seed: int) -> bytes:
    """The file with a few bytes changed, a part cut out, a part twice, or without its end."""
    random = np.random.default_rng(seed)
    data = bytearray(whole)
    start, length = int(random.integers(len(data))), int(random.integers(1, 64))
    match seed % 4:
        case 0:
            for place in random.integers(len(data), size=1 + seed % 8):
                data[place] = random.integers(256)
        case 1:
            del data[start : start + length]
        case 2:
            del data[start:]
        case _:
            data[start:start] = data[start : start + length]
    return bytes(data)


def with_payload(path: Path, marker: Path) -> None:
    """Makes a copy of an archive whose pickles run code, or of any file a pickle that does."""
    payload = pickle.dumps(Payload(marker))
    if not zipfile.is_zipfile(path):
        path.write_bytes(payload)
        return
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    pickles = [name for name in members if name.endswith(".pkl")] or [f"{path.stem}/data.pkl"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**members, **dict.fromkeys(pickles, payload)}.items():
            archive.writestr(name, content)


def main(name: str, folder: Path, count: int) -> None:
    """Loads each file, and asks what can be loaded; errors other than conch's end the process."""
    warnings.simplefilter("ignore")
    (engine,) = (each for each in FORMATS if each.name == name)
    harness = Harness(folder)
    file = version_of(engine, harness) / engine.file
    whole = file.read_bytes()
    backend = load_backend(engine.backend)
    in_use = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MOST_MEMORY, in_use + _MOST_MEMORY))
    for seed in range(-1, count):
        sys.stdout.write(f"seed {seed}\n")
        sys.stdout.flush()
        file.unlink()  # a library may have mapped it
        file.write_bytes(whole if seed < 0 else mutated(whole, seed))
        if seed < 0:
            with_payload(file, folder / "marker")
        try:
            spec = spec_of(engine, harness)
            backend.check(spec)
            model = harness.load(backend, spec)
            harness.infer(model, {engine.input: sample_rows(1)}).wait()
        except ConchError as error:
            sys.stdout.write(f"{error.message[:300]}\n")
        harness.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
