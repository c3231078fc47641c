"""Outputs of Python models that are not what the config says, and BF16, which numpy does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.servers import write_model

import conch
import conch.testing

CONFIG = """
    backend: "python"
    max_batch_size: 4
    input { name: "IN" data_type: TYPE_BF16 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_BF16 dims: [ -1 ] }
    output { name: "NUMBERS" data_type: TYPE_FP32 dims: [ -1 ] }
    instance_group { count: 2 kind: KIND_CPU }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


def answer(request):
    array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    assert array.dtype == np.float32 and array.flags.writeable
    numbers = np.zeros((1, 2, 3), np.int64) if array[0, 0] < 0 else array
    outputs = [pb_utils.Tensor("OUT", array / 3), pb_utils.Tensor("NUMBERS", numbers)]
    return pb_utils.InferenceResponse(outputs)


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = "decoupled" in args["model_name"]

    def execute(self, requests):
        if not self.decoupled:
            return [answer(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            sender.send(answer(request))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
BRAINS = """
import ml_dtypes
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().astype(ml_dtypes.bfloat16)
        given = pb_utils.Tensor("IN", array)
        assert given.as_numpy().tolist() == array.tolist() and given.triton_dtype() == "TYPE_BF16"
        call = pb_utils.InferenceRequest(
            model_name="plain", requested_output_names=["OUT"], inputs=[given]
        )
        thirds = pb_utils.get_output_tensor_by_name(call.exec(), "OUT").as_numpy()
        outputs = [pb_utils.Tensor("OUT", array[:, ::-1]), pb_utils.Tensor("NUMBERS", thirds)]
        return pb_utils.InferenceResponse(outputs)
"""
PLACEMENTS = ("in_process", pytest.param("worker", marks=pytest.mark.slow))
NAMES = ("plain", "decoupled")
CONTRADICTIONS = (
    "output 'NUMBERS' of model '{0}' contradicts its config: expected datatype FP32, got INT64",
    "output 'NUMBERS' of model '{0}' contradicts its config: expected 2 dimensions ([-1,-1]), got 3 "
    "([1,2,3])",
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in NAMES:
        write_model(tmp_path, name, CONFIG + DECOUPLED * (name == "decoupled"), {"model.py": MODEL})
    return tmp_path


def serving(repository: Path, placement: str, *options: str) -> conch.Server:
    settings = [f"python,{each}" for each in (f"placement={placement}", *options)]
    return conch.Server(
        repository, grpc_port=None, http_port=None, metrics_port=None, backend_config=settings
    )


def reasons(server: conch.Server) -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.state, entry.reason) for entry in server.models}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_contradiction_is_served_and_told_once(
    repository: Path, placement: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(repository, placement) as server:
        for _ in range(4):  # on both instances
            server.infer(name, {"IN": [[1.0]]})
        assert reasons(server)[name] == ("READY", "")
        for _ in range(4):
            assert server.infer(name, {"IN": [[-1.0]]})["NUMBERS"].tolist() == [[[0] * 3] * 2]
        texts = [text.format(name) for text in CONTRADICTIONS]
        assert reasons(server)[name] == ("READY", "; ".join(texts))
        logged = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert [each for each in logged if "contradicts" in each[1]] == [("WARNING", text) for text in texts]
        (repository / name / "1" / "model.py").write_text(MODEL + "\n")
        server.load(name)
        assert reasons(server)[name] == ("READY", "")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_contradiction_can_be_refused(repository: Path, placement: str) -> None:
    with serving(repository, placement, "strict-outputs=true") as server:
        for name in NAMES:
            server.infer(name, {"IN": [[1.0]]})
            with pytest.raises(conch.InternalError) as caught:
                server.infer(name, {"IN": [[-1.0]]})
            assert caught.value.message == CONTRADICTIONS[0].format(name)
            assert reasons(server)[name] == ("READY", "")
    with pytest.raises(conch.ConchError, match="strict-outputs must be 'true' or 'false', not 'maybe'"):
        serving(repository, placement, "strict-outputs=maybe").start()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_brain_floats_are_floats_to_models(repository: Path, placement: Any) -> None:
    with conch.testing.load(repository / "plain", placement=placement) as model:
        outputs = model.run({"IN": np.array([[1.0, -0.0, 3.0]], np.float32)})
        # A third, to the 8 bits that BF16 has of it.
        np.testing.assert_array_equal(outputs["OUT"], np.array([[0.333984375, 0, 1]], np.float32))
        assert outputs["NUMBERS"].tolist() == [[1, 0, 3]]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_brain_floats_of_ml_dtypes_are_taken(repository: Path, placement: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    write_model(repository, "brains", CONFIG, {"model.py": BRAINS})
    given = {"IN": np.array([[1.0, -0.0, 3.0]], ml_dtypes.bfloat16)}
    with serving(repository, placement, "strict-outputs=true") as server:
        answer = server.infer("brains", given)
        assert answer["OUT"].tolist() == [[3, 0, 1]]
        assert answer["NUMBERS"].tolist() == [[0.333984375, 0, 1]]
    with conch.testing.load(repository / "plain", placement=placement) as model:
        assert model.run(given)["OUT"].tolist() == [[0.333984375, 0, 1]]
