"""Servers that are killed in every state of their models: the next one serves what the repositories have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.emulators import Bucket, S3Emulator, put_tree, s3_emulator
from tests.support.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.support.loading import files, load
from tests.support.servers import WAIT_S, RawClient, ServerProcess, client_of, eventually, started
from tests.support.steered import Steering, answer_of, steered_inputs
from tritonclient.utils import InferenceServerException

from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions
from conch_control.version_phase import Phase

MODELS = ("far", "near")
MODES = {
    "explicit": ["--load-model=far", "--load-model=near", "--allow-model-upload"],
    "poll": ["--repository-poll-secs=0.2"],
    "watch": ["--repository-poll-secs=0.2"],  # for the store, which tells of nothing
}
UNFINISHED = (Phase.STAGING, Phase.LOADING, Phase.WARMING)


@pytest.fixture(scope="module")
def s3(grpc_is_warm: None) -> Iterator[S3Emulator]:
    with s3_emulator() as running:
        yield running


@dataclass
class Place:
    """Two repositories, one in a store and one on disk, and what servers of them need.

    Attributes:
        steering: Holds up what their models do.
        bucket: The store's bucket.
        proxy: Proxy before the store.
        path: Directory of everything else.
        flags: For servers.
        environment: For servers.
    """

    steering: Steering
    bucket: Bucket
    proxy: FaultyProxy
    path: Path
    flags: list[str]
    environment: dict[str, str]

    @property
    def control(self) -> str:
        """Address at which servers listen for operators."""
        return f"unix:{self.path}/control"

    def publish(self, version: int) -> None:
        """Adds a version to both models."""
        source = self.path / "source"
        self.steering.write(source, "far", version)
        put_tree(self.bucket, source / "far", "models/far/")
        aside = self.steering.write(self.path / "aside", "near", version)
        near = self.path / "local" / "near"
        if near.exists():
            (aside / str(version)).rename(near / str(version))
        else:
            aside.rename(near)

    @contextmanager
    def serving(self, mode: str) -> Iterator[ServerProcess]:
        """A server that may be killed."""
        flags = [f"--model-control-mode={mode}", *MODES[mode], *self.flags]
        with started(*flags, environment=self.environment) as server:
            server.wait_ready()
            yield server
            assert "Traceback" not in server.errors, server.errors

    @contextmanager
    def operator(self) -> Iterator[ModelControlClient]:
        """A client of the server's control port."""
        with closing(ModelControlClient(ConnectionOptions(self.control, None, None), WAIT_S)) as client:
            yield client

    def wait_for(self, version: int, phase: Phase, names: tuple[str, ...]) -> None:
        """Waits until models have a version in a phase."""
        with self.operator() as client:

            def reached() -> bool:
                known = versions(client)
                return all(known[name].get(version) is phase for name in names)

            eventually(reached, f"version {version} is {phase.value}")


def versions(client: ModelControlClient) -> dict[str, dict[int, Phase]]:
    """Phases of a server's models, by name and version."""
    return {
        model.name: {version.version: version.phase for version in model.versions}
        for model in client.models().models
    }


@pytest.fixture
def place(s3: S3Emulator, tmp_path: Path) -> Iterator[Place]:
    for name in ("steering", "local", "tmp"):
        (tmp_path / name).mkdir()
    bucket = s3.bucket(f"bucket-{tmp_path.name.replace('_', '-').lower()}")
    with faulty_proxy(s3.port) as proxy:
        flags = [
            f"--model-repository={s3.location(bucket.name, 'models', proxy.port)}",
            f"--model-repository={tmp_path}/local",
            f"--model-cache-directory={tmp_path}/cache",
            f"--control-address=unix:{tmp_path}/control",
            "--repository-settle-secs=0.1",
            "--grpc-port=0",
        ]
        environment = s3.environment() | {"TMPDIR": f"{tmp_path}/tmp"}
        made = Place(Steering(tmp_path / "steering"), bucket, proxy, tmp_path, flags, environment)
        made.publish(1)
        yield made


def staging(place: Place) -> None:
    place.proxy.fail(Fault.HANG, path="far/2/weights", method="GET")


def nothing(place: Place) -> None:
    pass


@dataclass(frozen=True)
class Moment:
    """Moment at which to kill.

    Attributes:
        prepare: Has things stop there.
        version: Number of the version.
        phase: The phase it is in.
        names: Names of the models that get there.
    """

    prepare: Callable[[Place], None]
    version: int
    phase: Phase
    names: tuple[str, ...] = MODELS


MOMENTS = {
    "staging": Moment(staging, 2, Phase.STAGING, ("far",)),
    "loading": Moment(lambda place: place.steering.hold("load", 2), 2, Phase.LOADING),
    "warming": Moment(lambda place: place.steering.hold("warm-up", 2), 2, Phase.WARMING),
    "ready": Moment(nothing, 2, Phase.READY),
    "draining": Moment(lambda place: place.steering.hold("run", 1), 1, Phase.DRAINING),
}


QUICK = ("staging", "loading", "draining")
"""The moments that differ most in what they leave behind; those of each run, not of the slow one alone."""


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        pytest.param(
            mode,
            moment,
            marks=() if mode == "watch" and name in QUICK else pytest.mark.slow,
            id=f"{name}-{mode}",
        )
        for mode in MODES
        for name, moment in MOMENTS.items()
    ],
)
def test_the_next_one_serves_what_the_repositories_have(place: Place, mode: str, moment: Moment) -> None:
    with place.serving(mode) as server, client_of(server) as client, ThreadPoolExecutor() as pool:
        assert [answer_of(client, name) for name in MODELS] == [1, 1]
        if mode == "explicit":
            with closing(RawClient(server.address)) as raw:
                assert load(raw, "given", files(v1=5)) == {}
            assert len(os.listdir(place.path / "tmp")) == 1
        moment.prepare(place)
        cut_off = []
        if moment.phase is Phase.DRAINING:
            cut_off = [pool.submit(answer_of_new_client, server, name) for name in MODELS]
            place.steering.wait_held("run", 1)
        place.publish(2)
        if mode == "explicit":
            cut_off += [pool.submit(load_with_new_client, server, name) for name in MODELS]
        place.wait_for(moment.version, moment.phase, moment.names)
        if moment.phase in UNFINISHED:
            assert answer_of(client, moment.names[0]) == 1
        server.kill()
        for call in cut_off:
            assert call.exception(WAIT_S) is None
    dead = os.listdir(place.path / "cache" / "owners")
    assert len(dead) == 1
    place.steering.let_go()
    place.proxy.heal()
    place.proxy.seen.clear()
    with place.serving(mode) as server, client_of(server) as client, place.operator() as operator:
        assert [answer_of(client, name) for name in MODELS] == [2, 2]
        assert client.is_server_ready()
        assert versions(operator) == {name: {2: Phase.READY} for name in MODELS}
        (owner,) = (place.path / "cache" / "owners").iterdir()
        assert owner.name not in dead
        assert len(list(owner.glob("*/far"))) == 1
        assert list((place.path / "cache" / "partial").iterdir()) == []
        assert os.listdir(place.path / "tmp") == []
        # What the first one has fetched in whole is not fetched again.
        again = {
            seen.path.partition("?")[0].partition("/models/")[2] for seen in place.proxy.seen if seen.range
        }
        # The small file may have been on its way too.
        assert again - {"far/2/model.py"} == ({"far/2/weights"} if moment.phase is Phase.STAGING else set())
        assert server.stop() == 0
    assert list((place.path / "cache" / "owners").iterdir()) == []


def answer_of_new_client(server: ServerProcess, name: str) -> None:
    """A request that the end of the server cuts off."""
    with client_of(server) as client, pytest.raises(InferenceServerException):
        client.infer(name, steered_inputs(), client_timeout=WAIT_S)


def load_with_new_client(server: ServerProcess, name: str) -> None:
    """A load that the end of the server may cut off."""
    with client_of(server) as client, suppress(InferenceServerException):
        client.load_model(name)
