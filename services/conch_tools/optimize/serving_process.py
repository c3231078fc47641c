"""Serves one candidate with conch: ``python -m conch_tools.optimize.serving_process JOB``.

The first job of a candidate has conch answer the samples, the second one measures. A process of its own shows
what the candidate takes of memory, and its crash ends nothing else.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.tensor import NUMPY_DTYPES
from conch.workers.host.fork_template import end_with_parent
from conch_api.embedded_server import Server
from conch_tools.optimize.profiling import measure
from conch_tools.optimize.steps.step_main import save_arrays

Array = npt.NDArray[Any]
_NS_PER_S = 1_000_000_000


def main(arguments: list[str]) -> int:
    """Runs a job; writes ``answers.json`` with `load_s`, `errors` and `profile`, or `load_error`."""
    file = Path(arguments[0])
    job = json.loads(file.read_text())
    end_with_parent(signal.SIGKILL, job["parent"])
    folder = file.parent
    inputs = _inputs(job)
    before = _resident()
    server = Server(
        job["repository"],
        model_control_mode="explicit",
        allow_grpc=False,
        allow_http=False,
        allow_metrics=False,
    )
    found: dict[str, Any] = {"errors": {}}
    try:
        with server:
            started = monotonic_ns()
            server.load(job["model"])
            found["load_s"] = (monotonic_ns() - started) / _NS_PER_S
            if job["seconds"]:
                found["profile"] = [asdict(row) for row in _measured(server, job, inputs)]
                found["host_bytes"] = max(_resident() - before, 0)
            else:
                for size in job["sizes"]:
                    _answer(server, job, inputs, size, folder, found["errors"])
    except ConchError as error:
        if "load_s" in found:
            raise
        found["load_error"] = error.message
    (folder / "answers.json").write_text(json.dumps(found))
    return 0


def _inputs(job: Mapping[str, Any]) -> dict[str, Array]:
    """The samples by the candidate's names and datatypes."""
    with np.load(job["samples"], allow_pickle=False) as arrays:
        return {
            each["name"]: arrays[each["reference"] or each["name"]].astype(
                NUMPY_DTYPES[each["datatype"]], copy=False
            )
            for each in job["inputs"]
        }


def _answer(
    server: Server,
    job: Mapping[str, Any],
    inputs: Mapping[str, Array],
    size: int,
    folder: Path,
    errors: dict[str, str],
) -> None:
    """Saves the outputs of the samples in batches of `size`; 0: one sample a request, without a dimension."""
    rows = len(next(iter(inputs.values())))
    rows = rows if size == max(job["sizes"]) else min(rows, job["few_rows"])
    parts = []
    try:
        for start in range(0, rows, size or 1):
            chunk = {name: array[start : min(start + (size or 1), rows)] for name, array in inputs.items()}
            given = chunk if size else {name: array[0] for name, array in chunk.items()}
            outputs = server.infer(job["model"], given, timeout=job["timeout_s"])
            parts.append({name: array if size else array[None] for name, array in outputs.items()})
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except (ConchError, ValueError) as error:
        errors[str(size)] = error.message if isinstance(error, ConchError) else str(error)
        return
    save_arrays(folder / f"answers-{size}.npz", {name: _plain(array) for name, array in joined.items()})


def _measured(server: Server, job: Mapping[str, Any], inputs: Mapping[str, Array]) -> Any:
    rows = len(next(iter(inputs.values())))
    batches: dict[int, list[dict[str, Array]]] = {}
    turn = 0

    def run(size: int) -> None:
        nonlocal turn
        if size not in batches:  # different samples, so that no cache of an engine helps
            starts = range(0, max(rows - size + 1, 1), size)
            chunks = [{name: _rows(array, start, size) for name, array in inputs.items()} for start in starts]
            batches[size] = (
                chunks if job["batching"] else [{k: v[0] for k, v in chunk.items()} for chunk in chunks]
            )
        turn += 1
        server.infer(job["model"], batches[size][turn % len(batches[size])])

    return measure(run, job["largest"] if job["batching"] else 1, job["seconds"])


def _rows(array: Array, start: int, count: int) -> Array:
    """Rows of an array, which begins again at its end."""
    return np.ascontiguousarray(np.take(array, range(start, start + count), axis=0, mode="wrap"))


def _plain(array: Array) -> Array:
    return array.astype("S") if array.dtype.kind == "O" else array


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
