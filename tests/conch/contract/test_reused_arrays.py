"""Python models that use an array again for the next answer, where answers wait before they are sent.

Triton copies a response's tensors when `execute` returns or when it is sent, so models do it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.conch.contract.test_batching import Blocked, send
from tests.conch.contract.test_cache import Counts
from tests.conch.contract.test_combinations import ORDERED, Stream, ask
from tests.conch.contract.test_sequences import DECOUPLED
from tests.support.ensembles import ensemble_config, plain, python_config, write_ensembles
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import (
    RawClient,
    eventually,
    write_model,
    write_probe,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.grpc import service_pb2

REUSES = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.out = np.zeros((1, 1), np.float32)

    def execute(self, requests):
        responses = []
        for request in requests:
            orders = json.loads(request.parameters())
            if "started" in orders:
                open(orders["started"], "w").close()
                while not os.path.exists(orders["wait_for"]):
                    time.sleep(0.002)
            np.add(request.inputs()[0].as_numpy(), 1, out=self.out)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.out)]))
        return responses
"""
SENDS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.out = np.zeros((1, 1), np.float32)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            (count,) = request.inputs()[0].as_numpy().ravel()
            for number in range(int(count)):
                self.out[:] = number
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.out)]))
            self.out[:] = -1
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
OVERWRITES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            array += 100
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        return responses
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("reused")
    write_ensembles(repository)
    write_probe(repository, "busy")
    write_model(repository, "reuses", python_config(), {"model.py": REUSES})
    steps = [plain("reuses", "X", "t"), plain("busy", "t", "Y")]
    write_model(repository, "reusing", ensemble_config(steps))
    write_model(repository, "ordered", python_config(more=ORDERED), {"model.py": REUSES})
    write_model(repository, "sends", python_config(more=DECOUPLED), {"model.py": SENDS})
    write_model(repository, "sending", ensemble_config([plain("sends", "X", "t"), plain("spy", "t", "Y")]))
    write_model(repository, "overwrites", python_config(), {"model.py": OVERWRITES})
    steps = [plain("spy", "X", "t"), plain("overwrites", "t", "u")]
    write_model(repository, "forked", ensemble_config([*steps, ("join", {"A": "t", "B": "u"}, {"OUT": "Y"})]))
    return repository


server = server_fixture(flags=[*LOAD_ALL, "--disable-auto-complete-config"], placed=True)


def ran(counts: Counts, times: int) -> bool:
    return bool(counts().get("success", 0) == times)


@pytest.mark.parametrize(
    ("model", "name", "reuses", "waits_for"),
    [("reusing", "X", "reuses", "busy"), ("ordered", "IN", "ordered", "ordered")],
    ids=["in an ensemble", "behind an earlier response"],
)
def test_arrays_of_responses_that_wait(
    raw: RawClient,
    client: Client,
    signal_files: tuple[Path, Path],
    model: str,
    name: str,
    reuses: str,
    waits_for: str,
) -> None:
    blocked = Blocked(raw, waits_for, signal_files)
    counts = Counts(client, reuses)
    calls = []
    for number in range(3):
        message = service_pb2.ModelInferRequest(
            model_name=model, raw_input_contents=[np.float32(number).tobytes()]
        )
        message.inputs.add(name=name, datatype="FP32", shape=[1, 1])
        calls.append(send(raw, message))
        eventually(partial(ran, counts, number + 1), "the first model is done")
    blocked.let_go()
    answers = [np.frombuffer(call.result().raw_output_contents[0], np.float32).item() for call in calls]
    assert answers == [1, 2, 3]


def test_arrays_of_decoupled_responses(client: Client) -> None:
    stream = Stream(client)
    stream.send("sending", [[3]], "a")
    assert stream.finish() == {"a": [1, 2, 3]}


def test_an_array_of_the_only_response(client: Client) -> None:
    assert ask(client, "sends", name="IN") == 0


def test_inputs_may_be_written_to(client: Client) -> None:
    assert ask(client, "forked", 1.0) == 2 + 102
