"""Runs one function of a step: ``step_main.py JOB [FOLDER]``, in an environment that may lack conch.

JOB is a JSON file. A ``convert`` function takes the `Job` and writes the converted model to its folder; what
it returns goes to ``facts.json`` there. An ``open`` function returns the model's signature and a function
that runs it; the script writes the signature to ``facts.json`` and, with the option ``run``, the outputs of
the samples to ``first.npz``, those of a second run to ``second.npz``, and those of single rows to
``single.npz``.

The text of an exception goes to ``failure.json``; a NotImplementedError says that the step is not possible
here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
Opened = tuple[dict[str, Any], Callable[[Arrays], Arrays]]
"""A signature (``inputs`` and ``outputs`` with name, datatype and dims; ``batching``), and a function."""

FAILED = 1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """Job of a function.

    Attributes:
        source: The model's file or folder.
        folder: Directory of the result.
        batch: The largest batch; 0 for a model without a batch dimension.
        signature: Signature of the original model, by its ``open`` function.
        options: Options of the step.
        samples_file: Arrays by input, with a row for each sample; may be absent.
    """

    source: Path
    folder: Path
    batch: int
    signature: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    samples_file: Path | None = None

    def samples(self) -> Arrays:
        """The samples; empty if there are none."""
        if self.samples_file is None:
            return {}
        with np.load(self.samples_file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes an ``.npz`` file; `numpy.savez` does not allow all names."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def main(arguments: list[str]) -> int:
    """Runs a job; returns the exit code."""
    own = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if path != own]  # a step's module must not hide a package
    file = Path(arguments[0])
    described = json.loads(file.read_text())
    _end_with_parent()
    folder = Path(arguments[1]) if len(arguments) > 1 else file.parent
    folder.mkdir(parents=True, exist_ok=True)
    samples = described["samples"]
    job = Job(
        Path(described["source"]),
        folder.absolute(),
        described["batch"],
        described["signature"],
        described["options"],
        Path(samples) if samples else None,
    )
    try:
        function = _function(described["function"])
        facts = _opened(job, function) if described["what"] == "open" else function(job)
    except Exception as error:  # of a framework, or of the user's model
        traceback.print_exc()
        refused = isinstance(error, NotImplementedError)
        text = str(error).strip() or type(error).__name__
        if not refused and not isinstance(error, ValueError):
            text = f"{type(error).__name__}: {text}"
        (folder / "failure.json").write_text(json.dumps({"text": text, "refused": refused}))
        return FAILED
    (folder / "facts.json").write_text(json.dumps(facts or {}, indent=1))
    return 0


def _end_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _function(text: str) -> Callable[..., Any]:
    path, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look for it
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _opened(job: Job, function: Callable[[Job], Opened]) -> Mapping[str, Any]:
    signature, run = function(job)
    if not job.options.get("run"):
        return signature
    samples = job.samples()
    rows = len(next(iter(samples.values())))
    for name in ("first", "second"):
        save_arrays(job.folder / f"{name}.npz", _in_chunks(run, samples, rows, job.batch))
    single = min(rows, job.options["single_rows"])
    save_arrays(job.folder / "single.npz", _in_chunks(run, samples, single, min(job.batch, 1)))
    return signature


def _in_chunks(run: Callable[[Arrays], Arrays], samples: Arrays, rows: int, batch: int) -> Arrays:
    """Outputs of the first rows, in requests of up to `batch` rows; 0: one sample each, without its row."""
    parts: list[Arrays] = []
    for start in range(0, rows, batch or 1):
        given = {name: array[start : min(start + (batch or 1), rows)] for name, array in samples.items()}
        if batch:
            parts.append(run(given))
        else:
            found = run({name: array[0] for name, array in given.items()})
            parts.append({name: np.asarray(array)[None] for name, array in found.items()})
    return {name: _plain(np.concatenate([part[name] for part in parts])) for name in parts[0]}


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array that a file can hold without pickles; texts of any length become bytes."""
    if array.dtype.kind in "OU":
        return np.array([_bytes(each) for each in array.ravel()], dtype="S").reshape(array.shape)
    return array


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
