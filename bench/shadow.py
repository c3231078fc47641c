"""Latency of a model whose requests all have a copy for a candidate: `python -m bench.shadow`.

Three models do the same: *alone* has no candidate, *equal* has one that does what its stable version does,
and that of *slow* takes ten times as long. They take turns under load; ratios are of the same round. Copies
run on the same processors as requests, so the machine has to have some to spare.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from bench import facts
from bench.perf import Window, measure_window
from bench.servers import ROOT, BenchServer, conch_command

MODEL = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds})
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each)]) for each in values]
"""
CONFIG = """
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
instance_group [ { count: 4 } ]
version_policy { all { } }
"""
ROLLOUT = '[labels]\nstable = 1\n[rollout]\nsteps = ["shadow 100% 1h"]\n'
CANDIDATES = {"alone": None, "equal": 1, "slow": 10}
CLIENTS = 2
_WAIT_S = 60.0


def write_models(repository: Path, seconds: float) -> None:
    """Writes the models; a request takes so many seconds of their stable version."""
    for name, factor in CANDIDATES.items():
        versions = {1: 1} if factor is None else {1: 1, 2: factor}
        for version, times in versions.items():
            directory = repository / name / str(version)
            directory.mkdir(parents=True)
            (directory / "model.py").write_text(MODEL.format(seconds=seconds * times))
        (repository / name / "config.pbtxt").write_text(CONFIG)
        if factor is not None:
            (repository / name / "rollout.toml").write_text(ROLLOUT)


def rollout(server: BenchServer, model: str) -> Any:
    """A model's rollout."""
    with urlopen(f"http://{server.http}/v2/repository/models/{model}/rollout") as answer:
        return json.load(answer)


def wait_for_shadows(server: BenchServer) -> None:
    """Waits until the candidates get copies."""
    end = time.monotonic() + _WAIT_S
    for model, factor in CANDIDATES.items():
        while factor is not None and rollout(server, model)["state"] != "STEP":
            if time.monotonic() > end:
                raise TimeoutError(f"the shadow step of '{model}' has not begun within {_WAIT_S:g} s")
            time.sleep(0.1)


def table(windows: dict[str, list[Window]], server: BenchServer) -> str:
    """The latencies of each model, and what became of the copies."""
    lines = [
        "| model | p50 µs | p99 µs | p99 beside alone | copies | dropped |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for model, found in windows.items():
        ratio = median(mine.p99 / quiet.p99 for mine, quiet in zip(found, windows["alone"], strict=True))
        shown = [f"{median(each):,.0f}" for each in ([w.p50 for w in found], [w.p99 for w in found])]
        copies = dropped = "-"
        if CANDIDATES[model] is not None:
            report = rollout(server, model)["shadow_report"]
            copies, dropped = f"{report['requests']:,}", f"{sum(report['dropped'].values()):,}"
        lines.append(f"| {model} | {' | '.join(shown)} | {ratio:.2f} | {copies} | {dropped} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--millis", type=float, default=5.0, help="time of a request in the stable version")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        write_models(repository, options.millis / 1000)
        server = BenchServer("shadow", partial(conch_command, repositories=(repository,)))
        server.start()
        try:
            wait_for_shadows(server)
            windows: dict[str, list[Window]] = {model: [] for model in CANDIDATES}
            for number in range(options.rounds + 1):
                for model, found in windows.items():
                    window = measure_window(model, server, CLIENTS, options.seconds if number else 1.0)
                    if number:  # the first round warms up
                        found.append(window)
            print("\n".join(f"{name}: {value}" for name, value in facts.machine().items()))
            print(f"revision: {facts.revision(ROOT)}\n\n{table(windows, server)}")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
