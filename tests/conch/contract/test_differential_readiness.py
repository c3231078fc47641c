"""Readiness of Triton and conch as their models come and go; docs/operations.md has the differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.peers import NEEDS_TRITON, Both, serving_both
from tests.support.servers import WAIT_S, RawClient, eventually, write_model
from tritonclient.grpc import service_pb2

pytestmark = [*NEEDS_TRITON, pytest.mark.slow]

MODEL = """
import json, os, time
from pathlib import Path
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._at = Path(json.loads(args["model_config"])["parameters"]["at"]["string_value"])
        key = f"{args['model_name']}-{args['model_version']}"
        (self._at / f"loading-{os.getpid()}-{key}").touch()
        while (self._at / "hold").exists():
            time.sleep(0.01)
        if (self._at / "fail").exists():
            raise ValueError("told to")

    def execute(self, requests):
        (self._at / f"running-{os.getpid()}").touch()
        while (self._at / "busy").exists():
            time.sleep(0.01)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
    parameters {{ key: "at" value {{ string_value: "{at}" }} }}
"""
Answers = tuple[bool, bool, bool]


class Ground:
    """Both servers, and the files that steer their models."""

    def __init__(self, path: Path, both: Both) -> None:
        self.path = path
        self.both = both

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        file = self.path / what
        file.touch()
        yield
        file.unlink()

    def seen(self, pattern: str) -> None:
        """Waits until both have made a file, and forgets it."""
        eventually(lambda: len(list(self.path.glob(pattern))) == 2, pattern)
        for file in self.path.glob(pattern):
            file.unlink()

    def model(self, versions: tuple[int, ...] = (1,), config: str = CONFIG) -> None:
        text = config.format(at=self.path)
        (self.path / "models" / "m").mkdir(exist_ok=True)
        write_model(self.path / "models", "m", text, {"model.py": MODEL}, versions)

    def load(self) -> list[Any]:
        return [self._start(client, "RepositoryModelLoad", model_name="m") for client in self._clients]

    def infer(self) -> list[Any]:
        request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\0" * 4])
        request.inputs.add(name="IN", datatype="FP32", shape=[1])
        return [_future(client, "ModelInfer", request) for client in self._clients]

    def unload(self) -> None:
        for client in self._clients:
            client("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="m"))

    def unloaded(self) -> None:
        """Waits until no version of the model is anything but gone, on both."""

        def gone(client: RawClient) -> bool:
            index = client("RepositoryIndex", service_pb2.RepositoryIndexRequest()).models
            return all(line.state in ("UNAVAILABLE", "") for line in index)

        eventually(lambda: all(map(gone, self._clients)), "unloaded")

    @property
    def theirs(self) -> Answers:
        return probes(self.both.triton)

    @property
    def ours(self) -> Answers:
        return probes(self.both.conch)

    @property
    def _clients(self) -> tuple[RawClient, RawClient]:
        return self.both.triton, self.both.conch

    def _start(self, client: RawClient, method: str, **fields: Any) -> Any:
        return _future(client, method, getattr(service_pb2, f"{method}Request")(**fields))


def _future(client: RawClient, method: str, message: Any) -> Any:
    call = client.channel.unary_unary(
        f"/inference.GRPCInferenceService/{method}", request_serializer=type(message).SerializeToString
    )
    return call.future(message, timeout=WAIT_S)


def probes(client: RawClient) -> Answers:
    """Answers of a server: it is ready, its health, the model is ready."""
    return (
        client("ServerReady", service_pb2.ServerReadyRequest()).ready,
        client("/grpc.health.v1.Health/Check", b"") == b"\x08\x01",
        client("ModelReady", service_pb2.ModelReadyRequest(name="m")).ready,
    )


def succeed(futures: list[Any]) -> None:
    for future in futures:
        future.result(WAIT_S)


def fail(futures: list[Any]) -> None:
    for future in futures:
        assert isinstance(future.exception(WAIT_S), grpc.RpcError)


@pytest.fixture(scope="module", params=["true", "false"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "true")


@pytest.fixture(scope="module")
def servers(strict: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    path = tmp_path_factory.mktemp("readiness")
    (path / "models").mkdir()
    # Triton waits for the exit timeout where a load has failed.
    flags = ["--exit-timeout-secs=1", f"--strict-readiness={str(strict).lower()}"]
    with serving_both(path / "models", "--model-control-mode=explicit", *flags) as both:
        yield Ground(path, both)


def test_a_life(servers: Ground, strict: bool) -> None:
    at = servers
    yes, loading, unready = (True, True, True), (not strict, not strict, False), (True, True, False)
    same: Callable[[Answers], bool] = lambda expected: at.ours == at.theirs == expected  # noqa: E731

    def differ(ours: Answers) -> bool:
        """True if conch says this, and Triton that the server is not ready, if it is strict."""
        return at.ours == ours and at.theirs == (not strict, not strict, ours[2])

    at.model((), "nonsense: 1")
    fail(at.load())
    assert same(unready), "its config is broken"
    at.model(())
    fail(at.load())
    assert same(loading), "it has no version directory"
    at.unload()
    assert differ(unready), "it has been unloaded without one"
    at.model()
    with at.told("hold"):
        loads = at.load()
        at.seen("loading-*")
        assert same(loading), "it is loaded for the first time"
        at.path.joinpath("fail").touch()
    fail(loads)
    assert same(loading), "it could not be loaded"
    at.path.joinpath("fail").unlink()
    succeed(at.load())
    at.seen("loading-*")
    assert same(yes), "it is loaded"

    at.path.joinpath("models", "m", "1", "more").touch()
    with at.told("hold"):
        loads = at.load()
        at.seen("loading-*")
        assert same(yes), "the same version is loaded anew"
        at.path.joinpath("fail").touch()
    fail(loads)
    assert same(yes), "the same version could not be loaded anew"
    at.path.joinpath("fail").unlink()

    at.model((1, 2))
    with at.told("hold"):
        loads = at.load()
        at.seen("loading-*")
        assert differ(yes), "another version is loaded"
        at.path.joinpath("fail").touch()
    fail(loads)
    assert differ(yes), "another version could not be loaded"
    at.path.joinpath("fail").unlink()

    with at.told("busy"):
        requests = at.infer()
        at.seen("running-*")
        succeed(at.load())
        at.seen("loading-*")
        assert differ(yes), "another version serves, the old one finishes its requests"
    succeed(requests)
    with at.told("busy"):
        requests = at.infer()
        at.seen("running-*")
        at.unload()
        assert differ(unready), "it is unloaded, and finishes its requests"
    succeed(requests)
    at.unloaded()
    assert same(unready), "it is unloaded"
