"""The seam `ServerPart`: a part of an add-on is called in each stage of start and stop, in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.servers import WAIT_S, copy_example, eventually

from conch import server_components
from conch.core.errors import UnavailableError
from conch.parts.server_part import PartContext, ServerPart
from conch.process.endpoint import Endpoint
from conch.server import InferenceServer
from conch.server_options import AddOnOptions, Opening, PartOptions
from conch_control.control_options import ControlOptions


@dataclass(frozen=True)
class Options(AddOnOptions):
    """Options of a part that records what it is asked for."""

    before: bool = False
    taken: bool = False
    hold: threading.Event | None = None
    calls: list[str] = field(default_factory=list)

    def openings(self, options: PartOptions) -> Sequence[Opening]:
        return [Opening("the test", "tests alone")]


class Part(ServerPart):
    def __init__(self, options: Options, context: PartContext) -> None:
        self._options = options
        self._context = context
        self._open = False

    def _record(self, call: str) -> None:
        served = self._context.core.state.registry.entries
        models = [name for name, each in served.items() if each.ready]
        self._options.calls.append(f"{call} {','.join(models)}".strip())

    def check(self) -> None:
        self._record("check")
        if self._options.taken:
            raise UnavailableError("it is taken")
        if self._options.hold is not None:
            assert self._options.hold.wait(WAIT_S)

    def check_models(self) -> None:
        self._record("check_models")

    def start(self) -> None:
        self._record("start")
        self._open = True

    def endpoints(self) -> Sequence[Endpoint]:
        return [Endpoint("Test", "test://", "here", "none", 7)] if self._open else []

    def refuse_changes(self) -> None:
        self._record("refuse_changes")

    def drain(self, grace_s: float) -> bool:
        self._record("drain")
        return True

    def disconnect(self, grace_s: float) -> bool:
        self._record("disconnect")
        return True

    def flush(self, grace_s: float) -> None:
        self._record("flush")

    def close(self, grace_s: float) -> bool:
        self._record("close")
        return False


class EarlyPart(Part):
    before_models = True


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def load_add_on(group: str, name: str) -> object:
        assert (group, name) == ("conch.parts", "test")
        return lambda options, context: [(EarlyPart if options.before else Part)(options, context)]

    monkeypatch.setattr(server_components, "load_add_on", load_add_on)
    copy_example(tmp_path, "simple")
    return tmp_path


def serving(models: Path, options: Options) -> InferenceServer:
    return InferenceServer(PartOptions(control=ControlOptions((models,)), add_ons={"test": options}))


STOP = ["refuse_changes simple", "drain simple", "disconnect simple", "flush simple", "close"]


def test_the_stages_come_in_order(models: Path) -> None:
    server = serving(models, options := Options())
    assert server.exposure == "open: the test to tests alone"
    server.start()
    assert [each.service for each in server.endpoints] == ["Test"]
    assert (server.port("Test"), server.url("Test")) == (7, "test://")
    assert not server.stop(), "the part has not ended in time"
    assert options.calls == ["check", "check_models simple", "start simple", *STOP]


def test_a_part_that_shows_loads_starts_before_them(models: Path) -> None:
    server = serving(models, options := Options(before=True))
    server.start()
    server.stop()
    assert options.calls == ["check", "start", "check_models simple", "start simple", *STOP]


def test_a_start_that_fails_closes_the_part(models: Path) -> None:
    server = serving(models, options := Options(taken=True))
    with pytest.raises(UnavailableError, match="it is taken"):
        server.start()
    assert options.calls == ["check", "drain", "disconnect", "flush", "close"]


def test_a_stopped_server_does_not_start(models: Path) -> None:
    server = serving(models, options := Options())
    server.stop()
    with pytest.raises(UnavailableError, match="Server exiting"):
        server.start()
    assert options.calls == ["refuse_changes", "drain", "disconnect", "flush", "close"]


def test_a_stop_cancels_a_start_and_closes_once(models: Path) -> None:
    server = serving(models, options := Options(hold=threading.Event()))
    with ThreadPoolExecutor(2) as threads:
        start = threads.submit(server.start)
        eventually(lambda: options.calls == ["check"], "the start to check the part")
        stop = threads.submit(server.stop)
        eventually(lambda: options.calls[-1] == "refuse_changes", "the stop to begin")
        assert not stop.done()
        assert options.hold is not None
        options.hold.set()
        with pytest.raises(UnavailableError, match="Server exiting"):
            start.result(WAIT_S)
        stop.result(WAIT_S)
    # Without the models: the start may have got as far as to load them.
    stages = [call.partition(" ")[0] for call in options.calls]
    assert stages == ["check", "refuse_changes", "drain", "disconnect", "flush", "close"]
