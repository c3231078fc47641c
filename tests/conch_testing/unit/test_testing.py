"""`conch.testing`: models under test, without a server."""

from __future__ import annotations

import textwrap
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import PATIENCE_S

import conch.testing
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Tensor
from conch.testing import ModelError
from conch_testing.model_repository import Repository

START = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
"""

ADD = """
    def execute(self, requests):
        self.log = getattr(self, "log", []) + [len(requests)]
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", a + a),
                pb_utils.Tensor("BATCH", np.full(a.shape, len(requests), np.int32)),
            ], parameters={"seen": request.parameters()}))
        return responses
"""

CONFIG = """
    max_batch_size: 4
    input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }
    output { name: "SUM" data_type: TYPE_FP32 dims: [ 2 ] }
    output { name: "BATCH" data_type: TYPE_INT32 dims: [ 2 ] }
"""

ROW = np.array([[1, 2]], np.float32)


def model(root: Path, body: str = ADD, config: str | None = CONFIG, name: str = "m") -> Path:
    directory = root / name
    (directory / "1").mkdir(parents=True)
    (directory / "1/model.py").write_text(START + body)
    if config is not None:
        (directory / "config.pbtxt").write_text(textwrap.dedent(config))
    return directory


def test_one_request(tmp_path: Path) -> None:
    outputs = conch.testing.run(model(tmp_path), {"A": ROW}, parameters={"x": 1})
    assert outputs["SUM"].tolist() == [[2, 4]]
    assert outputs.parameters == {"seen": '{"x":1}'}
    assert set(outputs) == {"SUM", "BATCH"}


def test_lists_become_arrays_of_the_right_type(tmp_path: Path) -> None:
    outputs = conch.testing.run(str(model(tmp_path)), {"A": [[1, 2]]}, outputs=["SUM"])
    assert set(outputs) == {"SUM"}
    assert outputs["SUM"].dtype == np.float32


def test_many_requests_share_batches(tmp_path: Path) -> None:
    config = {
        "dynamic_batching": {"preferred_batch_size": [3], "max_queue_delay_microseconds": 3_600_000_000}
    }
    with conch.testing.load(model(tmp_path), config=config) as loaded:
        assert loaded.config["max_batch_size"] == 4
        results = loaded.run_all({"A": ROW * number} for number in range(3))
        assert [result["SUM"][0, 0] for result in results] == [0, 2, 4]
        assert {result["BATCH"][0, 0] for result in results} == {3}


def test_configs_are_completed(tmp_path: Path) -> None:
    body = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "SUM", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "BATCH", "data_type": "TYPE_INT32", "dims": [2]})
        config.set_max_batch_size(8)
        return config
"""
    with conch.testing.load(model(tmp_path, body + ADD, None)) as loaded:
        assert loaded.config["max_batch_size"] == 8
        assert loaded.run({"A": ROW})["SUM"].tolist() == [[2, 4]]


def test_requests_that_do_not_fit(tmp_path: Path) -> None:
    with conch.testing.load(model(tmp_path)) as loaded:
        with pytest.raises(ModelError, match="expected 1 inputs but got 0") as info:
            loaded.run({})
        assert info.value.code == "INVALID_ARG"


FAILS = """
    def execute(self, requests):
        return self.answer(requests[0])

    def answer(self, request):
        raise ZeroDivisionError("by nothing")
"""


def test_each_run_raises_its_own_exception(tmp_path: Path) -> None:
    body = FAILS.replace("self.answer(requests[0])", "self.answer(requests[0].inputs()[0].as_numpy())")
    with conch.testing.load(model(tmp_path, body)) as loaded:
        for number in range(3):
            with pytest.raises(ZeroDivisionError, match="by nothing") as info:
                loaded.run({"A": ROW * number})
            innermost = info.traceback[-1]
            assert innermost.locals["request"].tolist() == [[number, 2 * number]]
        assert [type(error) for error in loaded.run_all([{"A": ROW}] * 2)] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_the_model_raises_is_raised(tmp_path: Path, kind: str) -> None:
    with conch.testing.load(model(tmp_path, FAILS.replace("def execute", f"{kind} execute"))) as loaded:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="by nothing") as info:
                loaded.run({"A": ROW})
        frames = traceback.extract_tb(info.value.__traceback__)
        assert [frame.name for frame in frames[-2:]] == ["execute", "answer"]
        assert not [frame for frame in frames if "/conch/backends/" in frame.filename]
        results = loaded.run_all([{"A": ROW}, {"A": ROW}])
        assert [type(result) for result in results] == [ZeroDivisionError] * 2


def test_what_loading_raises_is_raised(tmp_path: Path) -> None:
    body = "    def initialize(self, args):\n        raise KeyError('weights')\n"
    with pytest.raises(KeyError, match="weights"):
        conch.testing.load(model(tmp_path, body + ADD))
    with pytest.raises(SyntaxError) as info:
        conch.testing.load(model(tmp_path, "    def execute(:\n", name="other"))
    assert info.value.filename == str(tmp_path / "other/1/model.py")
    with pytest.raises(FileNotFoundError, match="there is no model directory"):
        conch.testing.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no version 3"):
        conch.testing.load(tmp_path / "m", version=3)
    with pytest.raises(ModelError, match="no field named"):
        conch.testing.load(model(tmp_path, config="max_batchsize: 3", name="wrong"))


def test_what_finalize_raises_is_raised(tmp_path: Path) -> None:
    directory = model(tmp_path, ADD + "\n    def finalize(self):\n        raise OSError('disk full')\n")
    with pytest.raises(OSError, match="disk full"), conch.testing.load(directory) as loaded:
        loaded.run({"A": ROW})
    # What went wrong first is what matters.
    with pytest.raises(ValueError, match="mine"), conch.testing.load(directory):
        raise ValueError("mine")


def test_error_responses(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        error = pb_utils.TritonError("no such row", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
    with pytest.raises(ModelError, match="no such row") as info:
        conch.testing.run(model(tmp_path, body), {"A": ROW})
    assert info.value.code == "NOT_FOUND"


STREAM = """
    closed = threading.Event()

    def execute(self, requests):
        try:
            for value in range(int(requests[0].inputs()[0].as_numpy()[0, 0])):
                yield pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.full((1, 2), value, np.float32))])
            if value == 2:
                raise ValueError("three is too many")
        finally:
            self.closed.set()
"""


def test_decoupled_models(tmp_path: Path) -> None:
    directory = model(tmp_path, STREAM, CONFIG + "model_transaction_policy { decoupled: true }")
    with conch.testing.load(directory) as loaded:
        assert loaded.decoupled
        assert [outputs["SUM"][0, 0] for outputs in loaded.run({"A": ROW * 2})] == [0, 1]
        stream = loaded.stream({"A": ROW * 3})
        assert [next(stream)["SUM"][0, 0] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="three is too many"):
            next(stream)
        # Leaving it early cancels it.
        endless = loaded.stream({"A": ROW * 1e9})
        next(endless)
        endless.close()  # type: ignore[attr-defined]


def test_sequences(tmp_path: Path) -> None:
    body = """
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            key = request.correlation_id()
            self.sums[key] = request.inputs()[0].as_numpy() + (0 if start else self.sums[key])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", self.sums[key])]))
        return responses
"""
    with conch.testing.load(model(tmp_path, body, CONFIG + "sequence_batching { }")) as loaded:
        loaded.run({"A": ROW}, sequence_id=7, sequence_start=True)
        loaded.run({"A": ROW}, sequence_id=7)
        last = loaded.run({"A": ROW}, sequence_id=7, sequence_end=True)
        assert last["SUM"].tolist() == [[3, 6]]
        with pytest.raises(ModelError, match="must specify the START flag"):
            loaded.run({"A": ROW}, sequence_id=7)


def test_it_runs_where_a_debugger_is_at_home(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        name = np.array([[threading.current_thread().name] * 2], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", name)]) for _ in requests]
"""
    config = CONFIG.replace('"SUM" data_type: TYPE_FP32', '"SUM" data_type: TYPE_STRING')
    outputs = conch.testing.run(model(tmp_path, body, config), {"A": ROW})
    assert outputs["SUM"][0, 0].decode() == threading.current_thread().name


def test_placement_in_a_config_does_not_count(tmp_path: Path) -> None:
    parameter = 'parameters { key: "CONCH_PLACEMENT" value { string_value: "worker" } }'
    assert conch.testing.run(model(tmp_path, config=CONFIG + parameter), {"A": ROW})["SUM"][0, 0] == 2


class EnvironmentSpec:
    """Takes the responses to a call of another model."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self._done = threading.Event()

    def __call__(self, request: Any, response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            self.responses.append(response)
        if final:
            self._done.set()

    def wait(self) -> list[InferenceResponse]:
        assert self._done.wait(PATIENCE_S)
        return self.responses


def test_exceptions_that_can_not_say_what_they_are(tmp_path: Path) -> None:
    body = """
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def execute(self, requests):
        raise self.Silent()
"""
    with conch.testing.load(model(tmp_path, body)) as loaded:
        for _ in range(2):
            with pytest.raises(Exception) as raised:
                loaded.run({"A": ROW})
            assert type(raised.value).__name__ == "Silent"


def ask(repository: Repository, name: str, values: list[float]) -> list[InferenceResponse]:
    asked = EnvironmentSpec()
    tensor = Tensor.from_array("A", np.array([values], np.float32))
    repository.calls.submit(InferenceRequest(name, "", {"A": tensor}, asked, 0))
    return asked.wait()


def test_stand_ins(tmp_path: Path) -> None:
    def double(inputs: dict[str, Any]) -> dict[str, Any]:
        inputs["A"] *= 2
        return {"B": inputs["A"], "C": [1, 2]}

    def count(inputs: dict[str, Any]) -> Any:
        for value in inputs["A"][0]:
            yield {"B": value}

    def refuse(inputs: dict[str, Any]) -> dict[str, Any]:
        raise ModelError("full", "UNAVAILABLE")

    def wrong(inputs: dict[str, Any]) -> Any:
        return [1]

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def silent(inputs: dict[str, Any]) -> dict[str, Any]:
        raise Silent

    repository = Repository("in_process")
    stand_ins = {"double": double, "count": count, "refuse": refuse, "wrong": wrong, "silent": silent}
    for name, stand_in in stand_ins.items():
        repository.add(name, stand_in)
    repository.add("m", model(tmp_path))
    (response,) = ask(repository, "double", [1, 2])
    assert {tensor.name: tensor.numpy().tolist() for tensor in response.outputs} == {
        "B": [[2, 4]],
        "C": [1, 2],
    }
    assert [each.outputs[0].numpy().item() for each in ask(repository, "count", [5, 6, 7])] == [5, 6, 7]
    assert ask(repository, "m", [1, 2])[0].outputs[0].numpy().tolist() == [[2, 4]]
    errors = [ask(repository, name, [1])[0].error for name in ("refuse", "wrong", "silent")]
    assert [(error.code, error.message) for error in errors if error is not None] == [
        ("UNAVAILABLE", "full"),
        ("INTERNAL", "TypeError: a stand-in must return a dict of arrays by output name, not list"),
        ("INTERNAL", "Silent: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"),
    ]
    assert repository.calls.model_ready("count", "")
    assert not repository.calls.model_ready("nobody", "")
    repository.close()


def test_what_auto_complete_config_raises_is_raised(tmp_path: Path) -> None:
    body = "    @staticmethod\n    def auto_complete_config(config):\n        raise RuntimeError('shapes?')\n"
    with pytest.raises(RuntimeError, match=r"shapes\?"):
        conch.testing.load(model(tmp_path, body + ADD))
