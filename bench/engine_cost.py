"""Measures what conch adds to an engine's own call: ``python -m bench.engine_cost [ENGINE ...]``.

One request of one row through gather, call and scatter of an instance in process, beside the engine called
directly with arrays, both in CPU time of the calling thread; engines that run batches on threads of their own
show less than they take. The two take turns in short windows, of which the fastest counts: on a shared
machine others only ever add.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Event

from tests.support.backend_harness import Harness
from tests.support.engines import ENGINES, missing_packages
from tests.support.engines.engine import Engine, sample_rows
from tests.support.engines.engine_models import spec_of, version_of

from conch.backends import load_backend
from conch.core.execution.placement import place
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import Tensor

WINDOWS, CALLS = 150, 200


def cost(engine: Engine, harness: Harness) -> tuple[float, float]:
    """Microseconds of the engine's own call, and of the instance."""
    version = version_of(engine, harness, engine.name)
    direct = engine.opened(version)
    spec = spec_of(engine, harness, engine.name)
    model = load_backend(engine.backend).load(spec)
    instance = model.create_instance(place(spec.instance_groups)[0])
    rows = sample_rows(1)
    request, _ = harness.request({engine.input: rows})
    data = bytes(request.inputs[engine.input].data)
    finished = Event()

    def make() -> Batch:
        request.inputs = {engine.input: Tensor(engine.input, "FP32", rows.shape, data)}
        return Batch([request], 1)

    def served() -> None:
        finished.clear()
        outcome = instance.start(make(), lambda batch, outcome: finished.set())
        if not isinstance(outcome, list):
            finished.wait()

    times = [1e9, 1e9, 1e9]
    for _ in range(WINDOWS):
        for number, call in enumerate((lambda: direct(rows), served, make)):
            times[number] = min(times[number], window(call))
    instance.close()
    model.close()
    return times[0], times[1] - times[2]


def window(call: Callable[[], object]) -> float:
    """Microseconds of one of many calls in a row."""
    begun = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - begun) / CALLS / 1000


def main(names: list[str]) -> None:
    """Prints a line for each engine."""
    warnings.simplefilter("ignore")
    print("| engine | its own call, us | through conch, us | added, us |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for engine in ENGINES:
            if (names and engine.name not in names) or missing_packages(engine):
                continue
            own, whole = cost(engine, Harness(Path(directory)))
            print(f"| {engine.name} | {own:.1f} | {whole:.1f} | {whole - own:.1f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
