"""Rate limits over the wire: models that share resources, and loads that ask for too much."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.calls import refused
from tests.support.servers import (
    NUMBER_CONFIG,
    WAIT_S,
    AnyServer,
    check_simple,
    client_of,
    copy_example,
    eventually,
    probe,
    probe_inputs,
    serving,
    simple_inputs,
    started,
    tensor,
    write_model,
    write_probe,
)
from tritonclient.grpc import InferenceServerClient as Client

RATED = "instance_group { kind: KIND_CPU count: %d rate_limiter { resources { %s } priority: %d } }"
ALONE = """
import os
import time

import triton_python_backend_utils as pb_utils

PATH = os.path.join(os.path.dirname(__file__), "..", "..", "somebody-runs")


class TritonPythonModel:
    def execute(self, requests):
        os.close(os.open(PATH, os.O_CREAT | os.O_EXCL))  # fails if another one runs
        try:
            time.sleep(0.001)  # what it does
        finally:
            os.unlink(PATH)
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in inputs]
"""
ORDER = """
import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._name = args["model_name"].encode()

    def execute(self, requests):
        path = os.path.join(os.path.dirname(__file__), "..", "..", "order")
        with open(path, "ab") as order:
            order.write(self._name)
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in inputs]
"""
LIMITED = ["--model-control-mode=explicit", "--rate-limit=execution_count"]
PREFIX = "load failed for model '{}': version 1 is at UNAVAILABLE state: Invalid argument: {};\n"


def rated(resource: str = 'name: "R" count: 1', count: int = 1, priority: int = 1) -> str:
    return RATED % (count, resource, priority)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AnyServer, Path]]:
    """A server that limits rates by what its models need, and its repository."""
    repository = tmp_path_factory.mktemp("limited")
    for name, count in (("a", 2), ("b", 1)):
        write_model(repository, name, NUMBER_CONFIG + rated(count=count), {"model.py": ALONE})
    for number in (1, 2):
        write_model(repository, str(number), NUMBER_CONFIG + rated(priority=number), {"model.py": ORDER})
    write_probe(repository, "held", rated())
    write_probe(repository, "free", "")
    with serving(repository, flags=[*LIMITED, "--load-model=*"]) as server:
        yield server, repository


@pytest.fixture
def client(limited: tuple[AnyServer, Path]) -> Iterator[Client]:
    with client_of(limited[0]) as client:
        yield client


def test_models_that_share_a_resource_never_run_at_the_same_time(client: Client) -> None:
    def send(number: int) -> float:
        inputs = [tensor("IN", np.array([number], np.float32))]
        result = client.infer("ab"[number % 2], inputs, client_timeout=WAIT_S)
        return float(result.as_numpy("OUT")[0])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(send, range(200))) == list(range(200))
    for name in "ab":
        (stats,) = client.get_inference_statistics(name).model_stats
        assert stats.inference_stats.fail.count == 0
        assert stats.inference_stats.success.count == 100


def test_priorities(client: Client, limited: tuple[AnyServer, Path], signal_files: tuple[Path, Path]) -> None:
    begun, go = signal_files
    done = threading.Semaphore(0)
    failures: list[Any] = []

    def on_answer(result: Any, error: Any) -> None:
        if error is not None:
            failures.append(error)
        done.release()

    orders = {"started": str(begun), "wait_for": str(go)}
    client.async_infer("held", probe_inputs(), on_answer, parameters=orders)
    eventually(begun.exists, "the resource is held")
    inputs = [tensor("IN", np.zeros(1, np.float32))]
    for _ in range(90):
        for name in ("1", "2"):
            client.async_infer(name, inputs, on_answer)
    probe(client, model="free")  # comes after them, on the same connection, and needs nothing
    go.touch()
    for _ in range(181):
        assert done.acquire(timeout=WAIT_S)
    assert failures == []
    order = (limited[1] / "order").read_text()
    shares = Counter(order[10:100])
    assert shares["1"] == pytest.approx(60, abs=10), order


def test_off_means_ignored(tmp_path: Path) -> None:
    for name in "ab":
        write_probe(tmp_path, name, rated())
    paths = {name: tmp_path / f"{name}-runs" for name in "ab"}
    for flags in ([], ["--rate-limit=off", "--rate-limit-resource=Q:1"]):
        with (
            serving(tmp_path, flags=flags) as server,
            client_of(server) as client,
            ThreadPoolExecutor(2) as pool,
        ):
            # Each waits for the other: they end only if they run at the same time.
            orders = [
                ("a", {"started": str(paths["a"]), "wait_for": str(paths["b"])}),
                ("b", {"started": str(paths["b"]), "wait_for": str(paths["a"])}),
            ]
            answers = [
                pool.submit(probe, client, model=name, parameters=parameters) for name, parameters in orders
            ]
            for answer in answers:
                answer.result(WAIT_S)
        for path in paths.values():
            path.unlink()


def test_loads_that_ask_for_too_much(tmp_path: Path) -> None:
    write_probe(tmp_path, "one", rated())
    write_probe(tmp_path, "four", rated('name: "R" count: 4'))
    write_probe(tmp_path, "unknown", rated('name: "Q" count: 2'))
    write_probe(tmp_path, "shared", rated('name: "R" count: 1 global: true'))
    flags = [*LIMITED, "--rate-limit-resource=R:1"]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        client.load_model("one")
        too_low = (
            'Resource count for "{}" is limited to {} which will prevent scheduling of one or more model '
            "instances, the minimum required count is {}"
        )
        for name, text in (
            ("four", too_low.format("R", 1, 4)),
            ("unknown", too_low.format("Q", 0, 2)),
            (
                "shared",
                'Resource "R" is present as both global and device-specific resource in the model '
                "configuration.",
            ),
        ):
            assert refused(client.load_model, name) == ("INVALID_ARGUMENT", PREFIX.format(name, text))
        probe(client, model="one")
        client.unload_model("one")
        eventually(lambda: not client.is_model_ready("one"), "it is unloaded")

        def shared_loads() -> bool:
            try:
                client.load_model("shared")
            except Exception as error:
                assert "both global and device-specific" in str(error)  # the old one is still on its way out
                return False
            return True

        eventually(shared_loads, "what was unloaded has left the limiter")
        probe(client, model="shared")


def test_reloads_and_unloads_give_everything_back(tmp_path: Path, signal_files: tuple[Path, Path]) -> None:
    begun, go = signal_files
    for name in "ab":
        write_probe(tmp_path, name, rated())
    with serving(tmp_path, flags=[*LIMITED, "--load-model=*"]) as server, client_of(server) as client:
        with ThreadPoolExecutor(3) as pool:
            orders = {"started": str(begun), "wait_for": str(go)}
            running = pool.submit(probe, client, model="a", parameters=orders)
            eventually(begun.exists, "the old version runs")
            write_probe(tmp_path, "a", rated() + "parameters { key: 'new' value { string_value: '1' } }")
            client.load_model("a")
            others = [pool.submit(probe, client, model=name) for name in "ab"]
            go.touch()
            for answer in (running, *others):
                answer.result(WAIT_S)
        client.unload_model("a")
        for _ in range(3):
            probe(client, model="b")


def test_failures_give_everything_back(client: Client) -> None:
    for order in ("raise", "exit", "too few", "no response"):
        refused(client.infer, "held", probe_inputs(), parameters={"do": order})
    probe(client, model="held")
    client.infer("a", [tensor("IN", np.zeros(1, np.float32))], client_timeout=WAIT_S)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--rate-limit=sometimes", "--rate-limit"),
        (
            "--rate-limit-resource=R",
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>'",
        ),
        ("--min-supported-compute-capability=new", "'new' is not a compute capability"),
    ],
)
@pytest.mark.process
def test_flags_that_can_not_be(tmp_path: Path, flag: str, text: str) -> None:
    with started(f"--model-repository={tmp_path}", flag) as server:
        assert server.wait() == 1
        assert text in server.errors


def test_more_instances_while_requests_run(tmp_path: Path) -> None:
    def group(count: int) -> str:
        return f"instance_group {{ kind: KIND_CPU count: {count} }}"

    go = tmp_path / "go"
    repository = tmp_path / "models"
    write_probe(repository, extra=group(1))
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    with (
        serving(repository, flags=flags) as server,
        client_of(server) as client,
        ThreadPoolExecutor(4) as pool,
    ):

        def running(number: int) -> Any:
            begun = tmp_path / str(number)
            orders = {"started": str(begun), "wait_for": str(go)}
            answer = pool.submit(probe, client, parameters=orders)
            return begun, answer

        def count() -> int:
            (shown,) = client.get_model_config("probe").config.instance_group
            return int(shown.count)

        first = running(0)
        eventually(first[0].exists, "the one instance runs")
        others = [running(number) for number in (1, 2)]
        assert not any(begun.exists() for begun, _ in others)
        (repository / "probe" / "config.pbtxt").write_text(
            (repository / "probe" / "config.pbtxt").read_text().replace("count: 1", "count: 3")
        )
        client.load_model("probe")
        assert count() == 3
        for begun, _ in others:
            eventually(begun.exists, "a new instance runs")
        assert not first[1].done()
        (repository / "probe" / "config.pbtxt").write_text(
            (repository / "probe" / "config.pbtxt").read_text().replace("count: 3", "count: 1")
        )
        load = pool.submit(client.load_model, "probe")  # while all of them are busy
        eventually(lambda: count() == 1, "the change is made")
        assert not load.done()
        go.touch()
        load.result(WAIT_S)
        for _, answer in (first, *others):
            answer.result(WAIT_S)
        probe(client)
        (stats,) = client.get_inference_statistics("probe").model_stats
        assert stats.inference_stats.success.count == 4, "counted from the first load on"
        config = {
            "backend": "python",
            "max_batch_size": 8,
            "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
            "output": [
                {"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]},
                {"name": "SEEN", "data_type": "TYPE_STRING", "dims": [1]},
            ],
            "instance_group": [{"kind": "KIND_CPU", "count": 2}],
        }
        client.load_model("probe", config=json.dumps(config))
        assert count() == 2
        (stats,) = client.get_inference_statistics("probe").model_stats
        assert stats.inference_stats.success.count == 4


def test_more_instances_of_an_onnx_model(tmp_path: Path) -> None:
    path = copy_example(tmp_path, "simple") / "config.pbtxt"
    text = path.read_text()
    flags = ["--model-control-mode=explicit", "--load-model=simple"]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        check_simple(client.infer("simple", simple_inputs()))
        for count in (4, 1):
            path.write_text(f"{text} instance_group {{ count: {count} }}")
            client.load_model("simple")
            (group,) = client.get_model_config("simple").config.instance_group
            assert group.count == count
            with ThreadPoolExecutor(4) as pool:
                results = pool.map(lambda start: client.infer("simple", simple_inputs(start)), range(20))
                for start, result in enumerate(results):
                    check_simple(result, start)
        (stats,) = client.get_inference_statistics("simple").model_stats
        assert stats.inference_stats.success.count == 41


def test_an_instance_that_fails_leaves_the_old_ones(tmp_path: Path) -> None:
    model = """
import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        if args["model_instance_name"].endswith("_2"):
            raise ValueError("two are enough")

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in inputs]
"""
    write_model(tmp_path, "m", NUMBER_CONFIG, {"model.py": model})
    flags = ["--model-control-mode=explicit", "--load-model=m"]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        (tmp_path / "m" / "config.pbtxt").write_text(NUMBER_CONFIG + "instance_group { count: 4 }")
        code, text = refused(client.load_model, "m")
        assert code == "INVALID_ARGUMENT"
        assert text.startswith("load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ")
        assert "ValueError: two are enough" in text
        assert [group.count for group in client.get_model_config("m").config.instance_group] == [1]
        client.infer("m", [tensor("IN", np.zeros(1, np.float32))], client_timeout=WAIT_S)
        (tmp_path / "m" / "config.pbtxt").write_text(NUMBER_CONFIG + "instance_group { count: 2 }")
        client.load_model("m")
        assert [group.count for group in client.get_model_config("m").config.instance_group] == [2]
        client.infer("m", [tensor("IN", np.zeros(1, np.float32))], client_timeout=WAIT_S)


def test_groups_that_can_not_be_placed(tmp_path: Path) -> None:
    write_probe(tmp_path, "gpu", "instance_group { kind: KIND_GPU }")
    write_probe(tmp_path, "gpus", "instance_group { name: 'g' kind: KIND_GPU gpus: [ 0 ] }")
    write_probe(tmp_path, "passive", "instance_group { kind: KIND_CPU passive: true }")
    flags = ["--model-control-mode=explicit", "--min-supported-compute-capability=98.5"]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        for name, text in (
            ("gpu", "instance group gpu_0 of model gpu has kind KIND_GPU but no GPUs are available"),
            (
                "gpus",
                "instance group g of model gpus specifies invalid or unsupported gpu id 0. GPUs with at "
                "least the minimum required CUDA compute compatibility of 98.500000 are: ",
            ),
        ):
            assert refused(client.load_model, name) == ("INVALID_ARGUMENT", PREFIX.format(name, text))
        client.load_model("passive")
        assert client.is_model_ready("passive")
        assert refused(client.infer, "passive", probe_inputs()) == (
            "UNAVAILABLE",
            "model 'passive' has passive instances only, which take no requests",
        )
