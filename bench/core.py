"""The core alone: a model that does nothing, no transport; what a request costs and how that grows.

Run with ``python -m bench.core``. Every scene is a function that puts a number of requests through models
made by the core's own classes and returns once all are answered. Scenes take turns, several rounds each.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench.facts import machine, revision, versions
from conch.core.admission import Admission
from conch.core.backend import BackendInstance, BackendModel
from conch.core.execution.placement import Placement
from conch.core.model_version import Model
from conch.core.registry import Entry, Registry, VersionState
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.route import WHOLE, Attribute, Route, route_salt
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import InlineClaim
from conch.core.spec import DynamicBatching, InstanceGroup, ModelSpec, SequenceBatching, TensorSpec
from conch.core.tensor import Tensor

_ROOT = Path(__file__).parent.parent
_BATCH = 64
_WINDOW = 1024
_SEQUENCES = 1000
_HOUR_NS = 3_600_000_000_000
_TENSOR = Tensor.from_array("IN", np.zeros((1, 16), np.float32))
_OUTPUTS = [Tensor.from_array("OUT", np.zeros((1, 16), np.float32))]


class _Nothing(BackendInstance):
    """Answers every request with the same tensor."""

    def execute(self, batch: Batch) -> Sequence[InferenceResponse]:
        return [InferenceResponse(_OUTPUTS) for _ in batch.requests]


class _NothingModel(BackendModel):
    def create_instance(self, placement: Placement) -> BackendInstance:
        return _Nothing()


def _models(
    count: int,
    batching: DynamicBatching | None = None,
    sequence: SequenceBatching | None = None,
    instances: int = 1,
    route: Route | None = None,
) -> tuple[Admission, list[Model]]:
    """Models named ``m0``, ``m1``, … in a registry of their own, each with a route if one is given."""
    registry = Registry()
    models = []
    entries = {}
    for number in range(count):
        spec = ModelSpec(
            name=f"m{number}",
            version=1,
            platform="",
            backend="none",
            max_batch_size=_BATCH,
            inputs=(TensorSpec("IN", "FP32", (16,)),),
            outputs=(TensorSpec("OUT", "FP32", (16,)),),
            directory=Path("/"),
            version_directory=Path("/1"),
            model_file="",
            instance_groups=(InstanceGroup("g", count=instances),),
            batching=batching,
            sequence=sequence,
        )
        models.append(Model.create(spec, _NothingModel()))
        entries[spec.name] = Entry({1: models[-1]}, {1: VersionState("READY")})
    for name, entry in entries.items():
        registry.publish(name, entry)
        registry.set_route(name, route)
    return Admission(registry), models


def _request(name: str, responder: Responder) -> InferenceRequest:
    """A request as the decoder makes it: one that has been seen before but for its tensor's bytes."""
    request = InferenceRequest(name, "", {"IN": _TENSOR}, responder, time.monotonic_ns(), "1")
    request.signature = name
    return request


class _Counter:
    """A responder that counts, and says when room has come in a window."""

    def __init__(self, window: int) -> None:
        self.done = 0
        self.sent = 0
        self.wanted = -1
        self._window = window
        self.reached = threading.Event()

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        self.done += 1
        if self.done == self.wanted:
            self.wanted = -1
            self.reached.set()

    def wait_until(self, done: int) -> None:
        """Waits until so many have been answered."""
        self.reached.clear()
        self.wanted = done
        if self.done < done:
            self.reached.wait()
        self.wanted = -1


def thread_pair(requests: int) -> Callable[[], None]:
    """One thread submits, the model's own thread batches and answers; at most a window is in flight."""
    admission, _ = _models(1, DynamicBatching())

    def run() -> None:
        counter = _Counter(_WINDOW)
        submit = admission.admit
        for sent in range(1, requests + 1):
            submit(_request("m0", counter))
            if sent - counter.done >= _WINDOW:
                counter.wait_until(sent - _WINDOW // 2)
        counter.wait_until(requests)

    return run


def many_models(models: int, requests: int) -> Callable[[], None]:
    """One thread submits to each model in turn and leads it: every request is a batch of its own."""
    admission, _ = _models(models, DynamicBatching())
    names = [f"m{number}" for number in range(models)]

    def run() -> None:
        counter = _Counter(1)
        submit = admission.admit
        for sent in range(requests):
            claim = submit(_request(names[sent % models], counter), True)
            assert claim is not None
            claim.run_inline(None)
        assert counter.done == requests

    return run


class _Call:
    """A call with a header; the context of its requests."""

    access = None

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self.caller = self

    def header(self, name: str) -> str:
        """A header, or an empty text."""
        return self._headers.get(name, "")


def routed(requests: int, headers: Mapping[str, str]) -> Callable[[], None]:
    """As `many_models` with one model, whose requests a route divides; by a key if the header has it."""
    sticky = (Attribute("header", "x-user-id"),)
    halves = Route(1, 2, ((1, WHOLE // 2),), route_salt("m0", "1"), sticky)
    admission, _ = _models(1, DynamicBatching(), route=halves)
    call = _Call(headers)

    def run() -> None:
        counter = _Counter(1)
        submit = admission.admit
        for _ in range(requests):
            request = _request("m0", counter)
            request.context = call
            claim = submit(request, True)
            assert claim is not None
            claim.run_inline(None)
        assert counter.done == requests

    return run


def deep_queue(depth: int, requests: int) -> Callable[[], None]:
    """So many requests wait all the time; each step adds a batch of them and runs one."""
    admission, _ = _models(1, DynamicBatching())

    def run() -> None:
        counter = _Counter(1)
        submit = admission.admit
        claim: InlineClaim | None = None
        for _ in range(depth):
            claim = submit(_request("m0", counter), True) or claim
        assert claim is not None
        for _ in range(requests // _BATCH):
            for _ in range(_BATCH):
                submit(_request("m0", counter), True)
            claim.run_inline(0)  # one batch; what is left stays promised
        while claim.run_inline(None):
            pass

    return run


def rounds_of_requests(
    requests: int, sequence: SequenceBatching | None, instances: int = 1
) -> Callable[[], None]:
    """A thousand callers with a request each, time and again; with or without sequences."""
    admission, _ = _models(1, None if sequence else DynamicBatching(), sequence, instances)
    first = True

    def run() -> None:
        nonlocal first
        counter = _Counter(1)
        submit = admission.admit
        for _ in range(requests // _SEQUENCES):
            claim: InlineClaim | None = None
            for number in range(1, _SEQUENCES + 1):
                request = _request("m0", counter)
                if sequence is not None:
                    request.correlation_id = number
                    request.sequence_start = first
                claim = submit(request, True) or claim
            first = False
            assert claim is not None
            claim.run_inline(
                _HOUR_NS
            )  # with a limit, so that no other thread is woken for the other instances
        assert counter.done == requests // _SEQUENCES * _SEQUENCES

    return run


@dataclass(frozen=True)
class _Scene:
    name: str
    requests: int
    run: Callable[[], None]
    reference: str = ""


def _scenes(requests: int) -> list[_Scene]:
    oldest = SequenceBatching("OLDEST", _HOUR_NS, max_candidates=_SEQUENCES)
    direct = SequenceBatching("DIRECT", _HOUR_NS)
    scenes = [_Scene("thread pair", requests, thread_pair(requests))]
    for count in (1, 10, 100, 1000):
        scenes.append(_Scene(f"models: {count}", requests, many_models(count, requests), "models: 1"))
    for name, headers in (("chance", {}), ("key", {"x-user-id": "user-1"})):
        scenes.append(_Scene(f"routed by {name}", requests, routed(requests, headers), "models: 1"))
    for depth in (1, 100, 1000, 10_000):
        total = requests // _BATCH * _BATCH + depth
        scenes.append(_Scene(f"queued: {depth}", total, deep_queue(depth, requests), "queued: 1"))
    whole = requests // _SEQUENCES * _SEQUENCES
    dynamic = f"dynamic, {_SEQUENCES} callers"
    instances = -(-_SEQUENCES // _BATCH)
    callers = {
        dynamic: rounds_of_requests(requests, None),
        f"oldest, {_SEQUENCES} sequences": rounds_of_requests(requests, oldest),
        f"direct, {_SEQUENCES} sequences, {instances} instances": rounds_of_requests(
            requests, direct, instances
        ),
    }
    for name, run in callers.items():
        scenes.append(_Scene(name, whole, run, dynamic))
    return scenes


def _measure(scene: _Scene) -> tuple[float, float]:
    """Requests per second, and microseconds of CPU time per request."""
    gc.collect()
    cpu = time.process_time_ns()
    start = time.perf_counter_ns()
    scene.run()
    elapsed = time.perf_counter_ns() - start
    cpu = time.process_time_ns() - cpu
    return scene.requests / elapsed * 1e9, cpu / scene.requests / 1e3


def _spread(values: list[float], digits: int) -> str:
    return f"{median(values):,.{digits}f} [{min(values):,.{digits}f}-{max(values):,.{digits}f}]"


def _table(scenes: list[_Scene], rounds: dict[str, list[tuple[float, float]]]) -> str:
    head = "| scene | req/s [min-max] | CPU µs/req [min-max] | CPU ratio | CPU µs more |"
    lines = [head, "|---|---:|---:|---:|---:|"]
    for scene in scenes:
        rates, costs = (list(column) for column in zip(*rounds[scene.name], strict=True))
        ratio = more = "-"
        if scene.reference and scene.reference != scene.name:
            # Of the same round: the machine changes its mind about its speed in between.
            pairs = list(zip(costs, (cost for _, cost in rounds[scene.reference]), strict=True))
            ratio = f"{median(mine / theirs for mine, theirs in pairs):.2f}"
            more = f"{median(mine - theirs for mine, theirs in pairs):.2f}"
        lines.append(f"| {scene.name} | {_spread(rates, 0)} | {_spread(costs, 2)} | {ratio} | {more} |")
    return "\n".join(lines)


def main() -> None:
    """Runs all scenes and prints a table, or writes a results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="requests of a scene in one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="scenes whose name begins with this")
    parser.add_argument("--out", type=Path, help="results file to write")
    options = parser.parse_args()
    facts = {**machine(), **versions(), "revision": revision(_ROOT)}
    scenes = [scene for scene in _scenes(options.requests) if scene.name.startswith(options.only)]
    gc.collect()
    gc.freeze()  # as the server does: what is loaded is not looked at again
    rounds: dict[str, list[tuple[float, float]]] = {scene.name: [] for scene in scenes}
    for number in range(options.rounds + 1):
        for scene in scenes:
            measured = _measure(scene)
            if number:  # the first round warms up
                rounds[scene.name].append(measured)
    table = _table(scenes, rounds)
    print(table)
    if options.out is not None:
        described = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
        options.out.write_text(
            f"# Benchmark: the core alone\n\n| | |\n|---|---|\n{described}\n\n"
            f"{options.requests} requests a round, {options.rounds} rounds after one to warm up, scenes in "
            f"turns; `python -m bench.core`. The model answers every request with the same tensor. Ratios "
            f"and differences are of CPU time per request, medians over rounds.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
