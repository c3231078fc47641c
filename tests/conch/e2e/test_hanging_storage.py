"""Effects of storage that hangs or fails on clients, the stop of a server and planners elsewhere."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.agents import FakeAgent
from tests.support.loading import write_number
from tests.support.servers import WAIT_S, RawClient
from tritonclient.grpc import service_pb2

from conch.core.errors import CancelledError, ConchError, InvalidArgumentError
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.process.main_thread import run_until_signal
from conch.server import InferenceServer
from conch.server_options import PartOptions, ServerOptions
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.model_definition import PollError
from conch_control.planner.plan import LoadOutcome
from conch_control.planner.planner_loop import outcome_of
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions, ControlPortOptions
from conch_control.remote_api.server import ControlPort
from conch_control.repository.layout import Fingerprint
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource, Progress, Staged


class Endless:
    """A model that is fetched until its reader gives up; a `ModelSource`."""

    name = "endless"
    location = "remote://bucket/endless"

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._never = threading.Event()

    def fingerprint(self) -> Fingerprint:
        return (("1/x", 1, 0, "etag"), ("config.pbtxt", 1, 0, "etag"))

    def read(self, path: str) -> bytes:
        return b""

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> Staged:
        self.begun.set()
        while not cancelled():
            self._never.wait(0.01)
        raise CancelledError("told to give up")


class Elsewhere:
    """A repository elsewhere; a `Repository`.

    Attributes:
        looked: Counts looks.
        hangs: True if looks wait for `go`.
    """

    location = "remote://bucket"

    def __init__(self, *models: ModelSource) -> None:
        self._models = {model.name: model for model in models}
        self.looked = threading.Semaphore(0)
        self.hangs = False
        self.go = threading.Event()

    def check(self) -> None:
        """It is there."""

    def models(self) -> Mapping[str, ModelSource]:
        if self.hangs:
            self.looked.release()
            assert self.go.wait(WAIT_S)
        return self._models

    def close(self) -> None:
        """It holds nothing."""


def call(client: RawClient, method: str, request: Any) -> Any:
    """Begins a call; its future."""
    return client.channel.unary_unary(f"/inference.GRPCInferenceService/{method}").future(
        request.SerializeToString(), timeout=WAIT_S
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_number(tmp_path, "m")
    return tmp_path


def server(repository: Path, elsewhere: Elsewhere, **options: Any) -> InferenceServer:
    control = ControlOptions(repositories=(repository,), mode="explicit", startup_models=("m",))
    made = InferenceServer(
        PartOptions(ServerOptions(**options), control=control, grpc=GrpcOptions(address="127.0.0.1", port=0))
    )
    made.start()
    made.agent.repositories = Repositories([*made.agent.repositories, elsewhere])
    return made


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Has gRPC open what it keeps for the life of the process."""
    directory = tmp_path_factory.mktemp("warm")
    write_number(directory, "m")
    made = server(directory, Elsewhere())
    with closing(RawClient(f"127.0.0.1:{made.port('gRPC')}")) as client:
        calls = [call(client, "RepositoryIndex", service_pb2.RepositoryIndexRequest()) for _ in range(8)]
        for each in calls:
            each.result(WAIT_S)
    assert made.stop()


def test_a_stop_gives_up_loads_that_only_fetch(repository: Path) -> None:
    model = Endless()
    made = server(repository, Elsewhere(model), exit_timeout_s=WAIT_S)
    with closing(RawClient(f"127.0.0.1:{made.port('gRPC')}")) as client:
        load = call(
            client, "RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="endless")
        )
        assert model.begun.wait(WAIT_S)
        assert made.stop(), "its time was not up"
        assert "Server exiting" in load.exception(WAIT_S).details()


def test_unloads_do_not_wait_for_storage_that_hangs(repository: Path) -> None:
    elsewhere = Elsewhere()
    made = server(repository, elsewhere)
    elsewhere.hangs = True
    with closing(RawClient(f"127.0.0.1:{made.port('gRPC')}")) as client:
        indexes = [call(client, "RepositoryIndex", service_pb2.RepositoryIndexRequest()) for _ in range(10)]
        assert elsewhere.looked.acquire(timeout=WAIT_S)
        try:
            unload = call(
                client, "RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="m")
            )
            unload.result(WAIT_S)
        finally:
            elsewhere.go.set()
        for index in indexes:
            index.result(WAIT_S)
    assert made.stop()


def poll_error() -> ConchError:
    error = PollError("m", "503 slow down")
    error.__cause__ = OSError("503 slow down")
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (poll_error, LoadOutcome.TRANSIENT),
        (lambda: PollError("m", "no such field"), LoadOutcome.FAILED),
        (lambda: InvalidArgumentError("boom"), LoadOutcome.FAILED),
    ],
)
def test_a_planner_elsewhere_knows_whether_another_try_may_succeed(
    tmp_path: Path, error: Callable[[], ConchError], outcome: LoadOutcome
) -> None:
    agent = FakeAgent()
    agent.failures["m"] = error
    port = ControlPort(agent, ControlPortOptions(f"unix:{tmp_path}/socket", 0))
    port.start()
    try:
        with closing(ModelControlClient(ConnectionOptions(f"unix:{tmp_path}/socket"))) as client:
            with pytest.raises(ConchError) as caught:
                client.load("m", {})
            assert caught.value.message == error().message
            assert outcome_of(caught.value) is outcome
    finally:
        assert port.stop(WAIT_S)


def test_a_signal_is_heard_while_the_summary_of_a_start_waits_for_storage() -> None:
    stopped = threading.Event()

    class Quick:
        def start(self) -> None:
            """It serves at once."""

        def stop(self) -> bool:
            stopped.set()
            return True

    def summary() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.wait(WAIT_S)

    assert run_until_signal(Quick(), summary) == 0
