"""A small backend whose model files say how it behaves, and repositories made for one test."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import PATIENCE_S

from conch.core.admission import Admission
from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.bls import ServerCalls
from conch.core.errors import ConchError, InvalidArgumentError, NotFoundError, UnavailableError
from conch.core.execution.placement import Placement
from conch.core.registry import Registry
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.agent import Agent

CONFIG = """
backend: "echo"
input { name: "X" data_type: TYPE_UINT8 dims: 1 }
output { name: "X" data_type: TYPE_UINT8 dims: 1 }
"""

WAIT_S = PATIENCE_S


class EchoInstance(BackendInstance):
    def __init__(self, backend: EchoBackend, gate: threading.Event | None, label: str) -> None:
        self._backend = backend
        self._gate = gate
        self._label = label

    def execute(self, batch: Batch) -> list[InferenceResponse]:
        if self._gate is not None:
            self._backend.waiting.release()
            assert self._gate.wait(WAIT_S)
        self._backend.on_execute(batch)
        return [InferenceResponse(list(request.inputs.values())) for request in batch.requests]

    def close(self) -> None:
        self._backend.closed.append(self._label)


class EchoModel(BackendModel):
    def __init__(self, backend: EchoBackend, spec: ModelSpec, behaviour: str) -> None:
        self._backend = backend
        self._spec = spec
        self._behaviour = behaviour

    def create_instance(self, placement: Placement) -> BackendInstance:
        self._backend.placements.append(placement)
        self._backend.room -= 1
        if self._behaviour == "slow instances":
            self._backend.loading.release()
            assert self._backend.gate.wait(WAIT_S)
        if self._behaviour == "bad instance" or self._backend.room < 0:
            raise NotFoundError(f"no room for {placement.name}")
        gate = self._backend.gate if self._behaviour == "slow" else None
        return EchoInstance(self._backend, gate, f"{self._spec.name}:{self._spec.version}")


class EchoBackend(Backend):
    """Answers with its inputs. The text of ``model.echo`` says what else happens."""

    default_model_file = "model.echo"
    cpu_instance_count = 1

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.loading = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)  # released for each execution that waits for the gate
        self.loaded: list[ModelSpec] = []
        self.closed: list[str] = []
        self.placements: list[Placement] = []
        self.room = 1_000_000  # for so many instances more
        self.calls: ServerCalls | None = None  # for models that call the server
        self.on_execute: Callable[[Batch], None] = lambda batch: None

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        path = version_directory / "complete.json"
        return {**config, **json.loads(path.read_text())} if path.exists() else config

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        self.calls = calls
        return self.load(spec)

    def load(self, spec: ModelSpec) -> BackendModel:
        behaviour = (spec.version_directory / spec.model_file).read_text()
        match behaviour.split():
            case ["slowly"]:
                self.loading.release()
                assert self.gate.wait(WAIT_S)
            case ["unavailable", *words]:
                raise UnavailableError(" ".join(words))
            case ["crash", *words]:
                raise ValueError(" ".join(words))
            case ["exit"]:
                raise SystemExit(3)
            case ["interrupt"]:
                raise KeyboardInterrupt
        self.loaded.append(spec)
        return EchoModel(self, spec, behaviour)


class Site:
    """Repositories and a registry for one test, and the agents that serve them."""

    def __init__(self, root: Path) -> None:
        self.repository = root / "models"
        self.repository.mkdir(exist_ok=True)
        self.registry = Registry(lambda: self._agents[-1].residency.cold if self._agents else None)
        self.backend = EchoBackend()
        self._agents: list[Agent] = []

    def get_backend(self, name: str, runtime: str = "", directory: Path | None = None, /) -> Backend:
        if name != "echo":
            raise InvalidArgumentError(
                f"unable to find backend library for backend '{name}', try specifying runtime on the model "
                f"configuration."
            )
        return self.backend

    @staticmethod
    def config(*more: str) -> str:
        """The usual config, with more in it."""
        return CONFIG + "\n".join(more)

    def model(
        self,
        name: str,
        versions: Mapping[int, str] | None = None,
        config: str | None = CONFIG,
        repository: Path | None = None,
    ) -> Path:
        """Writes a model, or writes over one; versions map to the text of their file."""
        directory = (repository or self.repository) / name
        directory.mkdir(parents=True, exist_ok=True)
        if config is not None:
            (directory / "config.pbtxt").write_text(config)
        for version, behaviour in ({1: "ok"} if versions is None else versions).items():
            (directory / str(version)).mkdir(exist_ok=True)
            (directory / str(version) / "model.echo").write_text(behaviour)
        return directory

    def remove(self, name: str) -> None:
        shutil.rmtree(self.repository / name)

    def agent(self, mode: Any = "explicit", **options: Any) -> Agent:
        repositories = options.pop("repositories", (self.repository,))
        cache = options.pop("cache", None)
        residency = options.pop("residency", None)
        agent = Agent(
            ControlOptions(repositories=repositories, mode=mode, **options),
            self.registry,
            self.get_backend,
            cache,
            residency=residency,
        )
        self._agents.append(agent)
        return agent

    def states(self, name: str) -> dict[int, tuple[str, str]]:
        entry = self.registry.entries[name]
        return {version: (state.state, state.reason) for version, state in entry.states.items()}

    def serving(self, name: str) -> dict[int, Servable]:
        return dict(self.registry.entries[name].ready)

    def loads(self) -> list[str]:
        return [f"{spec.name}:{spec.version}" for spec in self.backend.loaded]

    def send(self, name: str, version: str = "") -> SiteAnswer:
        """Sends a request; the answer comes when it comes."""
        answer = SiteAnswer()
        request = InferenceRequest(name, version, {"X": Tensor("X", "UINT8", (1,), b"\x07")}, answer, 0)
        self.registry.resolve(name, version).submit(request)
        return answer

    def send_in_sequence(
        self, name: str, correlation_id: int, start: bool = False, end: bool = False
    ) -> SiteAnswer:
        """Sends a request of a sequence, the way front ends do."""
        answer = SiteAnswer()
        request = InferenceRequest(name, "", {"X": Tensor("X", "UINT8", (1,), b"\x07")}, answer, 0)
        request.correlation_id = correlation_id
        request.sequence_start, request.sequence_end = start, end
        Admission(self.registry).admit(request)
        return answer

    def close(self) -> None:
        self.backend.gate.set()
        for agent in self._agents:
            assert agent.close(WAIT_S)


class SiteAnswer:
    """The one answer to a request."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: ConchError | None = None

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        assert final
        assert response is not None
        self._error = response.error
        self._done.set()

    @property
    def pending(self) -> bool:
        return not self._done.is_set()

    def error(self) -> ConchError | None:
        assert self._done.wait(WAIT_S)
        return self._error


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()
