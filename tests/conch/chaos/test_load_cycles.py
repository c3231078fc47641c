"""Models that are loaded and unloaded again and again: the server keeps nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.servers import (
    IN_PROCESS,
    check_simple,
    client_of,
    copy_example,
    eventually,
    probe,
    serving_process,
    simple_inputs,
    write_model,
    write_probe,
)

SETTLED = 50
"""Cycles after which a server has what it needs for one more."""
SPARE_THREADS = 2
"""The pool that answers control calls grows when a call comes before the last one's thread is idle again."""


def cycle(client: Any, model: str, use: Callable[[Any], None]) -> None:
    """Loads a model, uses it, and unloads it to the end."""
    client.load_model(model)
    use(client)
    client.unload_model(model)

    def gone() -> bool:
        lines = client.get_model_repository_index().models
        return [(line.state, line.reason) for line in lines] == [("UNAVAILABLE", "unloaded")]

    eventually(gone, "the model is unloaded")


@pytest.mark.parametrize(
    ("model", "placement", "settled", "cycles"),
    [
        pytest.param("probe", "in_process", SETTLED, 100, id="python-short"),
        pytest.param("simple", "in_process", SETTLED, 100, id="onnxruntime-short"),
        pytest.param("probe", "worker", 2, 6, id="worker-short"),
        pytest.param("probe", "in_process", SETTLED, 400, id="python-long", marks=pytest.mark.slow),
        pytest.param("simple", "in_process", SETTLED, 400, id="onnxruntime-long", marks=pytest.mark.slow),
        pytest.param("probe", "worker", 20, 60, id="worker-long", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_them(
    tmp_path: Path, grpc_is_warm: None, model: str, placement: str, settled: int, cycles: int
) -> None:
    repository, temporary = tmp_path / "models", tmp_path / "tmp"
    temporary.mkdir()
    if model == "probe":
        write_probe(repository)
    else:
        copy_example(repository, "simple")

    def use(client: Any) -> None:
        if model == "probe":
            probe(client)
        else:
            check_simple(client.infer("simple", simple_inputs()))

    environment = {"TMPDIR": str(temporary)}
    flags = ["--model-control-mode=explicit", f"--backend-config=python,placement={placement}"]
    if placement == "worker":  # else each load starts another process, to ask the model for its config
        flags.append("--disable-auto-complete-config")
    with (
        serving_process(repository, flags=flags, environment=environment) as server,
        client_of(server) as client,
    ):
        process = psutil.Process(server.process.pid)
        for _ in range(settled):
            cycle(client, model, use)
        memory, threads, files = process.memory_info().rss, process.num_threads(), process.num_fds()
        for _ in range(cycles - settled):
            cycle(client, model, use)
        eventually(lambda: process.num_threads() <= threads + SPARE_THREADS, "threads that unload end")
        eventually(lambda: process.memory_info().rss < 1.05 * memory, "memory is freed")
        eventually(lambda: process.num_fds() <= files, "files that were open for a moment are closed")
        eventually(lambda: process.children() == [], "the template of its workers has ended too")
        assert list(temporary.iterdir()) == []


CIRCLE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.me = self  # nothing but the garbage collector can free it
        self.weights = np.ones(25_000_000, np.float64)

    def execute(self, requests):
        output = pb_utils.Tensor("OUT", np.zeros(1, np.float32))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""


def test_models_of_the_start_give_their_memory_back_too(tmp_path: Path) -> None:
    """After its start, a server keeps the collector from looking at what it has by then."""
    config = 'backend: "python" input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } '
    config += 'output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }'
    write_model(tmp_path, "circle", config, {"model.py": CIRCLE})
    flags = ["--model-control-mode=explicit", "--load-model=circle", IN_PROCESS]
    with serving_process(tmp_path, flags=flags) as server, client_of(server) as client:
        memory = psutil.Process(server.process.pid).memory_info
        loaded = memory().rss
        client.unload_model("circle")
        eventually(lambda: loaded - memory().rss > 150_000_000, "its memory is back")
