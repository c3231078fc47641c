"""Engines under load, whole requests: ``python -m bench.engine_load [--rounds N] [--seconds S]``.

Two questions. Does a model get slower because a neighbour of another engine holds the interpreter? A client
asks a small model while a large one is kept busy, in the same server or in another one, where it takes as
much of the processors. And do instances take processors from each other? Four instances of the large model
are compared with one, with the threads that conch gives them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from threading import Event

import numpy as np
from tests.support.engines import ENGINES
from tests.support.engines.engine import WIDTH, Engine
from tests.support.engines.torch_engines import traced

from bench import facts
from bench.delays import Http, delays_alone
from bench.perf import measure_window
from bench.servers import BenchServer, conch_command

SMALL = ("onnxruntime", "openvino", "torchscript", "fil_xgboost_json")
LARGE = ("onnxruntime", "openvino", "torchscript")
LAYERS, ROWS, FEATURES = 10, 64, 512
PERCENTILES = (50, 99)
_SETTLE = 30


def write_large(engine: Engine, version: Path) -> None:
    """A model of some milliseconds on one core, whose input and output are small."""
    random = np.random.default_rng(3)
    weights = [(random.standard_normal((FEATURES, FEATURES)) / 32).astype(np.float32) for _ in range(LAYERS)]
    if engine.name == "torchscript":
        import torch

        class Layers(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.weights = [torch.from_numpy(weight) for weight in weights]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                rows = x.mean(1, keepdim=True).expand(ROWS, FEATURES)
                for weight in self.weights:
                    rows = torch.tanh(rows @ weight)
                return rows[:1, :WIDTH] + x * 0

        traced(Layers(), torch.zeros(1, WIDTH)).save(str(version / engine.file))
        return
    import onnx

    node, tensor = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [node("ReduceMean", ["x"], ["mean"], axes=[1]), node("Expand", ["mean", "shape"], ["h0"])]
    for number in range(LAYERS):
        nodes.append(node("MatMul", [f"h{number}", f"w{number}"], [f"m{number}"]))
        nodes.append(node("Tanh", [f"m{number}"], [f"h{number + 1}"]))
    nodes += [
        node("Slice", [f"h{LAYERS}", "from", "to"], ["part"]),
        node("Mul", ["x", "zero"], ["nothing"]),
        node("Add", ["part", "nothing"], ["y"]),
    ]
    constants = [tensor(weight, f"w{number}") for number, weight in enumerate(weights)]
    constants += [tensor(np.array([ROWS, FEATURES]), "shape"), tensor(np.array([0], np.float32), "zero")]
    constants += [tensor(np.array([0, 0]), "from"), tensor(np.array([1, WIDTH]), "to")]
    info = [onnx.helper.make_tensor_value_info(name, 1, ["n", WIDTH]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(nodes, "layers", info[:1], info[1:], constants)
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), version / engine.file)


def write_model(engine: Engine, repository: Path, name: str, instances: int) -> None:
    """A model of the repository; its name says which."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    if name.startswith("large"):
        write_large(engine, version)
    else:
        engine.write(version, 1.0)
    text = engine.config(name, f"instance_group {{ count: {instances} kind: KIND_CPU }}\n")
    (version.parent / "config.pbtxt").write_text(text)


@contextmanager
def serving(name: str, repository: Path, *models: str) -> Iterator[BenchServer]:
    """A server with some of the models."""
    flags = ["--model-control-mode=explicit", *(f"--load-model={model}" for model in models)]
    server = BenchServer(name, lambda ports: conch_command(ports, (repository,), flags))
    server.start()
    try:
        server.wait_for_http()
        yield server
    finally:
        server.stop()


def ask(server: BenchServer, engine: Engine, model: str) -> Http:
    """A client of a model of an engine."""
    row = {"name": engine.input, "datatype": "FP32", "shape": [1, WIDTH], "data": [0.5] * WIDTH}
    body = json.dumps({"inputs": [row]}).encode()
    path = f"/v2/models/{model}/infer"
    return Http(server.http, "POST", path, body, {"Content-Type": "application/json"})


def settle(server: BenchServer, engine: Engine, model: str) -> None:
    """Asks until an engine has compiled what it compiles late."""
    with closing(ask(server, engine, model)) as client:
        for _ in range(_SETTLE):
            client()


def percentiles(server: BenchServer, engine: Engine, model: str, seconds: float) -> list[float]:
    """Milliseconds of requests one after another."""
    settle(server, engine, model)
    with closing(ask(server, engine, model)) as client:
        return [float(each) * 1e3 for each in np.percentile(delays_alone(seconds, client), PERCENTILES)]


@contextmanager
def busy(server: BenchServer, engine: Engine, model: str) -> Iterator[None]:
    """Keeps a model busy with one client, which takes little time of this process."""
    ended = Event()

    def load() -> None:
        with closing(ask(server, engine, model)) as client:
            while not ended.is_set():
                client()

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            yield
        finally:
            ended.set()
            loading.result()


def neighbours(engines: dict[str, Engine], repository: Path, rounds: int, seconds: float) -> Iterator[str]:
    """A line for each pair of engines: the small model's latencies by where its neighbour is."""
    columns = ["small model", "busy neighbour"]
    for each in PERCENTILES:
        columns += [f"p{each} alone, ms", "neighbour elsewhere", "beside it"]
    yield f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    for small, large in product(SMALL, LARGE):
        if small == large:
            continue
        names = f"small_{small}", f"large_{large}"
        taken: dict[str, list[list[float]]] = {"alone": [], "elsewhere": [], "beside": []}
        with serving("beside", repository, *names) as here, serving("elsewhere", repository, *names) as there:
            for _ in range(rounds):
                taken["alone"].append(percentiles(here, engines[small], names[0], seconds))
                for where, server in (("elsewhere", there), ("beside", here)):
                    with busy(server, engines[large], names[1]):
                        taken[where].append(percentiles(here, engines[small], names[0], seconds))
        cells = [small, large]
        for place in range(len(PERCENTILES)):
            cells += [_spread([each[place] for each in one]) for one in taken.values()]
        yield f"| {' | '.join(cells)} |"


def instances(engines: dict[str, Engine], repository: Path, rounds: int, seconds: float) -> Iterator[str]:
    """A line for each engine: requests/s of four instances against one, with four clients."""
    yield "| engine | 1 instance, requests/s | 4 instances | ratio |\n|---|---|---|---|"
    for name in LARGE:
        seen: dict[int, list[float]] = {1: [], 4: []}
        for _ in range(rounds):
            for count, figures in seen.items():
                model = f"large{count}_{name}"
                with serving("instances", repository, model) as server:
                    settle(server, engines[name], model)
                    figures.append(measure_window(model, server, 4, seconds).throughput)
        ratios = [four / one for one, four in zip(seen[1], seen[4], strict=True)]
        yield f"| {name} | {_spread(seen[1], 0)} | {_spread(seen[4], 0)} | {_spread(ratios)} |"


def _spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both tables as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    engines = {engine.name: engine for engine in ENGINES}
    for name, value in facts.machine().items():
        print(f"{name}: {value}")
    with tempfile.TemporaryDirectory(prefix="conch-bench-") as folder:
        repository = Path(folder)
        for name in SMALL:
            write_model(engines[name], repository, f"small_{name}", 1)
        for name in LARGE:
            write_model(engines[name], repository, f"large_{name}", 2)  # a thread each
            for count in (1, 4):
                write_model(engines[name], repository, f"large{count}_{name}", count)
        for table in (instances, neighbours):
            for line in table(engines, repository, options.rounds, options.seconds):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
