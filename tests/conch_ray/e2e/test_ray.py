"""conch behind Ray Serve's gRPC proxy: a local Ray with two replicas, in an interpreter that has Ray."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tests.support.ray_cluster import ENVIRONMENT, RayCluster, local_ray
from tests.support.servers import PYTHON_EXAMPLES, WAIT_S, eventually
from tritonclient.utils import InferenceServerException

PROBE = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._delay_s = float(args["model_name"] == "slow") * 0.05
        self._ill = os.path.join(args["model_repository"], "ill")
        if os.path.exists(self._ill):
            os.remove(self._ill)

    def is_ready(self):
        return not os.path.exists(self._ill)

    def execute(self, requests):
        time.sleep(self._delay_s)
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        pids = np.array([os.getpid()], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * given), pb_utils.Tensor("PID", pids)])
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "PID" data_type: TYPE_INT64 dims: [ 1 ] }
parameters { key: "CONCH_PLACEMENT" value { string_value: "%s" } }
"""
TWO = {"num_replicas": 2}
MULTIPLEXED = ("red", "green", "blue")

pytestmark = [pytest.mark.process, pytest.mark.slow]


def write_models(directory: Path) -> None:
    for name in ("probe", "worker", "slow", "extra", *MULTIPLEXED):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "1" / "model.py").write_text(PROBE)
        placement = "worker" if name == "worker" else "in_process"
        (directory / name / "config.pbtxt").write_text(CONFIG % placement)
    shutil.copytree(PYTHON_EXAMPLES / "repeat", directory / "repeat")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ray") / "models"
    write_models(directory)
    return directory


@pytest.fixture(scope="module")
def ray(repository: Path) -> Iterator[RayCluster]:
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip(f"Ray is not installed in {ENVIRONMENT}; run tests/setup_ray.sh")
    with local_ray() as cluster:
        cluster.deploy("main", TWO | {"user_config": {"models": []}}, main_args(repository))
        yield cluster


def main_args(repository: Path) -> dict[str, object]:
    return {
        "repositories": [str(repository)],
        "model_control_mode": "explicit",
        "load_model": ["probe", "worker", "repeat"],
        "multiplexed_models": 1,
    }


@contextmanager
def client_of(ray: RayCluster) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(ray.url) as client:
        yield client


def ask(
    client: triton.InferenceServerClient, model: str, number: int, application: str = "main", **headers: str
) -> tuple[int, int]:
    """Returns the model's answer and the pid of the process that gave it."""
    tensor = triton.InferInput("IN", [1], "INT64")
    tensor.set_data_from_numpy(np.array([number], np.int64))
    result = client.infer(model, [tensor], headers={"application": application, **headers})
    return int(result.as_numpy("OUT")[0]), int(result.as_numpy("PID")[0])


def answering(client: triton.InferenceServerClient, model: str, application: str = "main") -> int:
    """The pid of the process that answers; 0 if its replica has just died."""
    try:
        return ask(client, model, 1, application)[1]
    except InferenceServerException as error:
        assert error.status() == "StatusCode.UNAVAILABLE", error
        return 0


def two_replicas(client: triton.InferenceServerClient, model: str = "probe") -> set[int]:
    """The pids of both replicas, or of their workers; waits until two answer."""
    pids: set[int] = set()

    def asked() -> bool:
        pids.update(answering(client, model) for _ in range(4))
        pids.intersection_update(psutil.pids())
        return len(pids) == 2

    eventually(asked, "two replicas answer")
    return pids


def test_a_killed_replica_loses_no_answer_silently_and_is_replaced(ray: RayCluster) -> None:
    outcomes: Counter[str] = Counter()
    stop = threading.Event()

    def load(first: int) -> None:
        number = first
        with client_of(ray) as client:
            while not stop.is_set():
                number += 10
                try:
                    right = ask(client, "probe", number)[0] == 2 * number
                    outcomes["right" if right else "wrong"] += 1
                except InferenceServerException as error:
                    outcomes[error.status()] += 1

    with client_of(ray) as client:
        before, workers = two_replicas(client), two_replicas(client, "worker")
        threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: outcomes["right"] > 50, "the load runs")
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        answered = outcomes["right"]
        after = two_replicas(client)
        eventually(lambda: outcomes["right"] > answered + 50, "the load goes on")
        stop.set()
        for thread in threads:
            thread.join()
        assert killed not in after
        assert len(before & after) == 1
        assert set(outcomes) <= {"right", "StatusCode.UNAVAILABLE"}, outcomes
        # The worker of the killed replica has gone too.
        eventually(lambda: sum(map(psutil.pid_exists, workers)) == 1, "its worker ends")


def test_errors_have_their_status_and_streams_their_responses(ray: RayCluster) -> None:
    application = {"application": "main"}
    with client_of(ray) as client:
        assert client.is_server_ready(headers=application)
        assert client.get_model_metadata("probe", headers=application).inputs[0].name == "IN"
        with pytest.raises(InferenceServerException, match="unknown model: 'none'") as caught:
            ask(client, "none", 1)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: responses.put((result, error)), headers=application)
        inputs = [triton.InferInput("IN", [3], "INT32"), triton.InferInput("DELAY", [3], "UINT32")]
        inputs[0].set_data_from_numpy(np.array([7, 8, 9], np.int32))
        inputs[1].set_data_from_numpy(np.zeros(3, np.uint32))
        inputs.append(triton.InferInput("WAIT", [1], "UINT32"))
        inputs[2].set_data_from_numpy(np.zeros(1, np.uint32))
        client.async_stream_infer("repeat", inputs)
        got = [responses.get(timeout=WAIT_S) for _ in range(3)]
        assert [int(result.as_numpy("OUT")[0]) for result, error in got] == [7, 8, 9]
        client.async_stream_infer("none", inputs)
        result, error = responses.get(timeout=WAIT_S)
        assert result is None
        assert "unknown model: 'none'" in error.message()
        client.stop_stream()
    refused = httpx.get(f"{ray.http_url}/main/v2/health/ready")
    assert (refused.status_code, "gRPC" in refused.text) == (501, True)


def test_a_new_user_config_loads_and_unloads_on_every_replica(ray: RayCluster, repository: Path) -> None:
    def states(client: triton.InferenceServerClient) -> set[str]:
        """The states of `extra` that replicas see; one of them answers each time."""
        index = [client.get_model_repository_index({"application": "main"}) for _ in range(12)]
        return {model.state for each in index for model in each.models if model.name == "extra"}

    with client_of(ray) as client:
        replicas = two_replicas(client)
        for models, state in (["extra"], {"READY"}), ([], {"UNAVAILABLE", ""}):
            ray.deploy("main", TWO | {"user_config": {"models": models}}, main_args(repository))
            eventually(lambda: states(client) <= state, f"extra is {state}")  # noqa: B023  (called here)
        assert two_replicas(client) == replicas  # the same processes


def test_multiplexed_models_are_loaded_when_needed_and_bounded(ray: RayCluster) -> None:
    with client_of(ray) as client:
        for number, name in enumerate(MULTIPLEXED * 2):
            assert ask(client, name, number, multiplexed_model_id=name)[0] == 2 * number
            for _ in range(4):
                index = client.get_model_repository_index({"application": "main"}).models
                assert sum(each.state == "READY" for each in index if each.name in MULTIPLEXED) <= 1
        with pytest.raises(InferenceServerException, match="failed to load 'none'"):
            ask(client, "none", 1, multiplexed_model_id="none")
        assert ask(client, "probe", 4, multiplexed_model_id="probe")[0] == 8  # one of the start: stays


def test_a_replica_that_is_not_ready_is_replaced(ray: RayCluster, repository: Path) -> None:
    args = {"repositories": [str(repository)], "model_control_mode": "explicit", "load_model": "extra"}
    ray.deploy("moody", {"num_replicas": 1, "health_check_failure_threshold": 1}, args)
    with client_of(ray) as client:
        before = ask(client, "extra", 1, "moody")[1]
        (repository / "extra" / "ill").touch()
        eventually(lambda: not psutil.pid_exists(before), "Ray stops it")
        after = eventually(lambda: answering(client, "extra", "moody"), "another one answers")
        assert after != before


def test_saturation_adds_a_replica(ray: RayCluster, repository: Path) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1.0,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 600.0,
        "policy": {"policy_function": "conch_ray:SaturationPolicy", "policy_kwargs": {"target": 0.5}},
    }
    args = {"repositories": [str(repository)], "model_control_mode": "explicit", "load_model": "slow"}
    ray.deploy("scaled", {"autoscaling_config": scaling}, args)
    pids: set[int] = set()
    with client_of(ray) as client:

        def asked() -> bool:
            pids.add(ask(client, "slow", 1, "scaled")[1])
            return len(pids) == 2

        eventually(asked, "a second replica answers")  # one request at a time keeps one instance busy
