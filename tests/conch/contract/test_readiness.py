"""Models that say themselves whether they are ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import WAIT_S, client_of, eventually, serving, tensor, write_model

pytestmark = pytest.mark.process

MODEL = """
import json
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._state = Path(parameters["state"]["string_value"])

    {sync}def is_ready(self):
        state = self._state.read_text()
        if state == "raise":
            raise ValueError("told to")
        return state == "ready"

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
    parameters {{ key: "state" value {{ string_value: "{state}" }} }}
    instance_group {{ count: 2 }}
"""
Served = tuple[triton.InferenceServerClient, Path]


@pytest.fixture(
    scope="module",
    params=[(sync, place) for place in ("in_process", "worker") for sync in ("def", "async def")],
    ids=lambda case: "-".join(case).replace(" ", "-"),
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A client of a server with a model that reads in a file whether it is ready."""
    directory = tmp_path_factory.mktemp("ready")
    state = directory / "state"
    state.write_text("ready")
    sync = request.param[0].removesuffix("def")
    files = {"model.py": MODEL.replace("{sync}", sync)}
    write_model(directory / "models", "checked", CONFIG.format(state=state), files)
    other = {"model.py": MODEL.replace("{sync}def is_ready", "def other")}
    write_model(directory / "models", "plain", CONFIG.format(state=state), other)
    flags = [f"--backend-config=python,placement={request.param[1]}"]
    with serving(directory / "models", flags=flags) as server, client_of(server) as client:
        assert client.is_server_live()
        yield client, state


@pytest.mark.parametrize("answer", ["ready", "not", "raise"])
def test_readiness(served: Served, answer: str) -> None:
    client, state = served
    state.write_text(answer)
    ready = answer == "ready"
    assert client.is_model_ready("checked") is ready
    assert client.is_model_ready("checked", "1") is ready
    assert client.is_model_ready("plain")
    assert client.is_server_ready() is ready
    assert client.is_server_live()
    assert not client.is_model_ready("nope")
    # Whatever it says, it takes requests.
    array = np.arange(3, dtype=np.float32)
    assert client.infer("checked", [tensor("IN", array)]).as_numpy("OUT").tolist() == [0, 1, 2]


def test_a_check_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    go = tmp_path / "go"
    model = MODEL.replace("{sync}", "").replace(
        "state = self._state.read_text()",
        "import time\n        while not self._state.exists(): time.sleep(0.01)\n        state = 'ready'",
    )
    write_model(tmp_path / "models", "hangs", CONFIG.format(state=go), {"model.py": model})
    with (
        serving(tmp_path / "models") as server,
        client_of(server) as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady").future(b"")
        assert client.is_server_live(client_timeout=WAIT_S)
        assert client.get_model_config("hangs", client_timeout=WAIT_S)
        assert not ready.done()
        go.touch()
        assert ready.result(WAIT_S) == b"\x08\x01"
        eventually(lambda: client.is_model_ready("hangs"), "it is ready now")
