"""A model that is swapped every few seconds under load: `python -m bench.hotswap`, see bench/README.md.

Sixteen clients keep a model busy. In the first window nothing else happens. In the second one the model's
files change again and again, and another model with 500 MB of weights is loaded beside it. A client of our
own asks all the time which edition of the model answers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import grpc
import numpy as np

from bench import facts
from bench.measurement import MeasurementError
from bench.perf import Window, measure_window
from bench.protocol import Probe
from bench.servers import ROOT, BenchServer, Command, Ports, ServerError, conch_command, triton_command

CLIENTS = 16
WEIGHTS = 500_000_000
SWAPPED = "swapped"
HEAVY = "heavy"
CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 64
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ }}
"""
# Loads as real models do: reads its weights, and works on them.
MODEL = '''
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with its edition."""

    def initialize(self, args):
        directory = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(directory, "edition")) as file:
            self.edition = np.float32(file.read())
        weights = os.path.join(directory, "weights.bin")
        if os.path.exists(weights):
            self.weights = np.fromfile(weights, np.float32)
            self.norm = float(np.linalg.norm(self.weights))

    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            output = pb_utils.Tensor("OUTPUT0", np.full_like(values, self.edition))
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
'''
MODES = {
    "conch": ("explicit", "poll", "watch"),
    "triton": ("explicit", "poll"),
}
COMMANDS = {"conch": conch_command, "triton": triton_command}


@dataclass
class Result:
    """Result of one server in one mode.

    Attributes:
        quiet: The window without swaps, or what went wrong in it.
        swapping: The window with swaps, or what went wrong in it.
        swaps: Number of swaps.
        stale: Answers of an old edition to requests sent after the swap was known to be done.
        failed: Requests of the client of our own that failed.
        delays: Seconds from the new edition's appearance to its first answer.
        heavy: Seconds that loading the heavy model took; empty if unknown.
    """

    quiet: Window | str = "not measured"
    swapping: Window | str = "not measured"
    swaps: int = 0
    stale: int = 0
    failed: int = 0
    delays: list[float] = field(default_factory=list)
    heavy: list[float] = field(default_factory=list)


class Repository:
    """A model repository whose models are put there in one rename each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "models"
        self._aside = folder / "aside"
        self.path.mkdir()
        self._aside.mkdir()
        self._write(SWAPPED).rename(self.path / SWAPPED)
        heavy = self._write(HEAVY)
        rng = np.random.default_rng(0)
        rng.standard_normal(WEIGHTS // 4, np.float32).tofile(heavy / "1" / "weights.bin")

    def _write(self, name: str) -> Path:
        model = self._aside / name
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG.format(name=name))
        (model / "1" / "model.py").write_text(MODEL)
        (model / "1" / "edition").write_text("1")
        return model

    def change(self, edition: int) -> None:
        """Puts a new edition of the swapped model in the place of the one before."""
        staged = self._aside / "edition"
        staged.write_text(str(edition))
        staged.rename(self.path / SWAPPED / "1" / "edition")

    def show_heavy(self, shown: bool) -> None:
        """Puts the heavy model into the repository, or takes it away."""
        source, target = self._aside / HEAVY, self.path / HEAVY
        if not shown:
            source, target = target, source
        source.rename(target)


class Asker:
    """A client that asks without pause which edition answers, and knows which it may be."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="asker")
        self.least = 1
        self.newest = 0
        self.asked = self.stale = self.failed = 0
        self.error = ""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Asks while the block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def wait_for(self, edition: int, timeout_s: float) -> bool:
        """Waits until a edition has answered."""
        with self._changed:
            return self._changed.wait_for(lambda: self.newest >= edition, timeout_s)

    def _run(self) -> None:
        with Probe(self._address) as probe:
            while not self._stop.is_set():
                least = self.least  # taken before the request is sent
                try:
                    edition = probe.infer(SWAPPED, np.zeros((1, 16), np.float32))
                except grpc.RpcError as error:
                    self.failed += 1
                    self.error = self.error or str(error.details())
                    continue
                self.asked += 1
                self.stale += edition < least
                if edition > self.newest:
                    with self._changed:
                        self.newest = int(edition)
                        # A request sent from now on must not get an older edition, which was replaced.
                        self.least = max(self.least, self.newest)
                        self._changed.notify_all()


def _swap(
    repository: Repository, server: BenchServer, asker: Asker, mode: str, result: Result, every_s: float
) -> Callable[[threading.Event], None]:
    """Function that swaps the model beside the load of the second window, until its event, by whole swaps."""

    def show_heavy(probe: Probe) -> None:
        begin = time.monotonic()
        repository.show_heavy(True)
        if mode == "explicit":
            probe.load(HEAVY)
            result.heavy.append(time.monotonic() - begin)

    def run(stop: threading.Event) -> None:
        edition = 1
        begin = time.monotonic()
        with Probe(server.address) as probe, Probe(server.address) as other:
            heavy = threading.Thread(target=show_heavy, args=(other,), name="heavy")
            while not stop.wait(max(begin + edition * every_s - time.monotonic(), 0.0)):
                edition += 1
                appeared = time.monotonic()
                repository.change(edition)
                if mode == "explicit":
                    probe.load(SWAPPED)
                    asker.least = edition
                if asker.wait_for(edition, 60.0):
                    result.delays.append(time.monotonic() - appeared)
                    result.swaps += 1
                if edition == 4:
                    heavy.start()
            if heavy.ident is not None:
                heavy.join()

    return run


def measure(name: str, mode: str, seconds: float, every_s: float) -> Result:
    """Both windows of one server in one mode."""
    result = Result()
    flags = [f"--model-control-mode={mode}"]
    flags += [f"--load-model={SWAPPED}"] if mode == "explicit" else []
    flags += ["--repository-poll-secs=1"] if mode == "poll" else []
    with tempfile.TemporaryDirectory(prefix="conch-hotswap-") as folder:
        repository = Repository(Path(folder))
        start: Callable[[Ports], Command] = partial(
            COMMANDS[name], repositories=(repository.path,), flags=flags
        )
        server = BenchServer(f"hotswap-{name}-{mode}", start)
        try:
            server.start()
            window = partial(measure_window, SWAPPED, server, CLIENTS, seconds)
            measure_window(SWAPPED, server, CLIENTS, min(seconds, 3.0))  # warms up
            result.quiet = window()
            asker = Asker(server.address)
            stop = threading.Event()
            swap = _swap(repository, server, asker, mode, result, every_s)
            thread = threading.Thread(target=swap, args=(stop,), name="swaps")
            with asker.asking():
                thread.start()
                try:
                    result.swapping = window()
                finally:
                    stop.set()
                    thread.join()
            result.stale, result.failed = asker.stale, asker.failed
            if asker.error:
                print(f"  {name} {mode}: {asker.error}", flush=True)
        except (MeasurementError, ServerError) as error:
            ended = server.how_it_ended()
            text = ended or str(error)
            if isinstance(result.quiet, str):
                result.quiet = text
            else:
                result.swapping = text
        finally:
            server.stop()
    return result


def _row(name: str, mode: str, result: Result) -> str:
    quiet, swapping = result.quiet, result.swapping
    cells = [name, mode]
    for window in (quiet, swapping):
        if isinstance(window, str):
            cells += [window.replace("|", "/")[:120], "-"]
        else:
            cells += [f"{window.throughput:,.0f}", f"{window.p99:,.0f}"]
    if isinstance(quiet, Window) and isinstance(swapping, Window):
        cells.append(f"{swapping.p99 / quiet.p99:.2f}")
    else:
        cells.append("-")
    delays = f"{median(result.delays):.2f} [{max(result.delays):.2f}]" if result.delays else "-"
    heavy = f"{result.heavy[0]:.1f}" if result.heavy else "-"
    return " | ".join([*cells, str(result.swaps), str(result.failed), str(result.stale), delays, heavy])


HEADER = (
    "server | mode | req/s | p99 µs | req/s, swaps | p99 µs, swaps | p99 ratio | swaps | failed | stale "
    "| s to first answer [max] | s to load 500 MB"
)


def main(arguments: list[str] | None = None) -> int:
    """Measures every server in every mode it has, and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.hotswap", description=__doc__)
    parser.add_argument("--servers", default="conch,triton", help="who takes part (%(default)s)")
    parser.add_argument("--modes", default="explicit,poll,watch", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a window (%(default)s)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between swaps (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = options.servers.split(",")
    known = {**facts.machine(), **facts.versions(), "revision": facts.revision(ROOT)}
    lines = [f"| {HEADER} |", "|" + "---|" * (HEADER.count("|") + 1)]
    print(HEADER, flush=True)
    for mode in options.modes.split(","):
        for name in names:
            if mode in MODES[name]:
                row = _row(name, mode, measure(name, mode, options.seconds, options.every))
                print(row, flush=True)
                lines.append(f"| {row} |")
    if options.out is not None:
        facts_table = "\n".join(f"| {key} | {value} |" for key, value in known.items())
        options.out.write_text(
            f"# Benchmark: swaps under load\n\n| | |\n|---|---|\n{facts_table}\n\n"
            f"{CLIENTS} clients, windows of {options.seconds:g} s; in the second one a new "
            f"edition of the model every {options.every:g} s, and a model with {WEIGHTS // 10**6} MB of "
            f"weights loaded beside it. *Stale*: answers of an older edition to requests sent after the load "
            f"call had returned, or after a newer one had answered.\n\n" + "\n".join(lines) + "\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
