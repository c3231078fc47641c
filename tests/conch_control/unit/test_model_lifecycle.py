"""Loading, replacing and unloading, on the real core with a real, small backend."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import PATIENCE_S

from conch.core.errors import InternalError, InvalidArgumentError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from tests.support.sites import Site

ALL = "version_policy { all {} }"


def drained(name: str) -> None:
    """Waits until nothing of a model drains any more."""
    for thread in threading.enumerate():
        if thread.name == f"conch-unload-{name}":
            thread.join(PATIENCE_S)


def test_loads_and_serves(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m")
    agent = site.agent()
    with caplog.at_level(logging.INFO):
        agent.load("m", {})
    assert site.states("m") == {1: ("READY", "")}
    assert site.send("m").error() is None
    assert agent.ready()
    assert [message.partition(" in ")[0] for message in caplog.messages if "load" in message] == [
        "loading: m:1",
        "'m' version 1 loaded",
        "successfully loaded 'm'",
    ]


def test_unmodified_is_not_loaded_again(site: Site) -> None:
    directory = site.model("m")
    agent = site.agent()
    agent.load("m", {})
    model = site.serving("m")[1]
    agent.load("m", {})
    assert site.serving("m")[1] is model
    (directory / "1" / "model.echo").write_text("another")
    agent.load("m", {})
    assert site.serving("m")[1] is not model
    assert site.loads() == ["m:1", "m:1"]


def test_replaced_version_finishes_its_requests(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m", {1: "slow"})
    agent = site.agent()
    agent.load("m", {})
    old = site.send("m")
    queued = site.send("m")
    site.model("m", {1: "ok"})
    with caplog.at_level(logging.INFO):
        agent.load("m", {})
        assert site.send("m").error() is None
        assert old.pending
        assert queued.pending
        assert site.backend.closed == []
        site.backend.gate.set()
        assert old.error() is None
        assert queued.error() is None
        drained("m")
    assert site.backend.closed == ["m:1"]
    assert "successfully unloaded 'm' version 1" in caplog.messages
    assert site.states("m") == {1: ("READY", "")}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("unavailable no memory left", "Unavailable: no memory left"),
        ("crash list index", "Internal: list index"),
        ("exit", "Internal: 3"),
        ("interrupt", "Internal: KeyboardInterrupt"),
        ("bad instance", "Not found: no room for m_0"),
    ],
)
def test_failing_load(site: Site, behaviour: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m", {1: behaviour})
    agent = site.agent()
    with pytest.raises(InvalidArgumentError) as raised:
        agent.load("m", {})
    assert raised.value.message == (
        f"load failed for model 'm': version 1 is at UNAVAILABLE state: {reason};\n"
    )
    assert site.states("m") == {1: ("UNAVAILABLE", reason)}
    assert f"failed to load 'm' version 1: {reason}" in caplog.messages
    assert not agent.ready()
    with pytest.raises(NotFoundError, match="'m' has no available versions"):
        site.registry.resolve("m")
    site.model("m", {1: "ok"})
    agent.load("m", {})
    assert agent.ready()


def test_one_failing_version_fails_all(site: Site) -> None:
    site.model("m", {1: "ok", 2: "crash two", 3: "crash three"}, site.config(ALL))
    with pytest.raises(InvalidArgumentError) as raised:
        site.agent().load("m", {})
    assert raised.value.message == (
        "load failed for model 'm': version 2 is at UNAVAILABLE state: Internal: two;\n"
        "version 3 is at UNAVAILABLE state: Internal: three;\n"
    )
    assert site.states("m") == {
        1: ("UNAVAILABLE", "unloaded"),
        2: ("UNAVAILABLE", "Internal: two"),
        3: ("UNAVAILABLE", "Internal: three"),
    }
    assert site.backend.closed == ["m:1"]


def test_failing_reload_leaves_the_old_version_serving(site: Site) -> None:
    site.model("m", {1: "ok"}, site.config(ALL))
    agent = site.agent()
    agent.load("m", {})
    model = site.serving("m")[1]
    site.model("m", {1: "ok 2", 2: "crash boom"}, site.config(ALL))
    for _ in range(2):  # a failure is tried again, though nothing has changed since
        with pytest.raises(InvalidArgumentError):
            agent.load("m", {})
    assert site.serving("m") == {1: model}
    assert site.states("m") == {1: ("READY", ""), 2: ("UNAVAILABLE", "Internal: boom")}
    assert site.send("m").error() is None
    assert site.loads() == ["m:1", "m:1", "m:1"]


def test_half_written_config_leaves_the_old_version_serving(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    directory = site.model("m")
    agent = site.agent()
    agent.load("m", {})
    site.model("m", config='backend: "echo" input [ { name: "X"')
    with pytest.raises(InternalError) as raised:
        agent.load("m", {})
    assert raised.value.message.startswith("failed to load 'm', failed to poll from model repository: ")
    assert f"Poll failed for model directory 'm': {directory / 'config.pbtxt'}:1:" in caplog.text
    assert site.states("m") == {1: ("READY", "")}
    assert site.send("m").error() is None
    assert agent.ready()


def test_policy_that_selects_fewer_versions(site: Site) -> None:
    site.model("m", {1: "ok", 2: "ok"}, site.config(ALL))
    agent = site.agent()
    agent.load("m", {})
    site.model("m", {}, site.config("version_policy { specific { versions: 1 } }"))
    agent.load("m", {})
    drained("m")
    assert site.states("m") == {1: ("READY", ""), 2: ("UNAVAILABLE", "unloaded")}
    assert agent.ready()


def test_failed_version_that_is_gone_is_forgotten(site: Site) -> None:
    site.model("m", {1: "ok", 2: "crash"}, site.config(ALL))
    agent = site.agent()
    with pytest.raises(InvalidArgumentError):
        agent.load("m", {})
    site.model("m", {}, site.config("version_policy { specific { versions: 1 } }"))
    agent.load("m", {})
    assert site.states("m") == {1: ("READY", "")}


def test_no_version(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m", {})
    text = "at least one version must be available under the version policy of model 'm'"
    with pytest.raises(InvalidArgumentError, match=rf"^load failed for model 'm': {text}\n$"):
        site.agent().load("m", {})
    assert text in caplog.text


def test_unload_drains(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m", {1: "slow"})
    agent = site.agent()
    agent.load("m", {})
    running = site.send("m")
    with caplog.at_level(logging.INFO):
        agent.unload("m", False)
        assert site.states("m") == {1: ("UNLOADING", "")}
        with pytest.raises(NotFoundError, match="has no available versions"):
            site.send("m")
        with pytest.raises(UnavailableError, match="version 1 is not at ready state"):
            site.send("m", "1")
        assert agent.ready(), "it is taken out of service on purpose"
        site.backend.gate.set()
        assert running.error() is None
        drained("m")
    assert site.states("m") == {1: ("UNAVAILABLE", "unloaded")}
    assert "successfully unloaded 'm' version 1" in caplog.messages
    assert agent.ready()
    agent.load("m", {})
    assert site.loads() == ["m:1", "m:1"]


def test_load_while_the_unloaded_version_still_drains(site: Site) -> None:
    site.model("m", {1: "slow"})
    agent = site.agent()
    agent.load("m", {})
    running = site.send("m")
    agent.unload("m", False)
    site.model("m", {1: "ok"})
    agent.load("m", {})
    assert site.states("m") == {1: ("READY", "")}
    site.backend.gate.set()
    assert running.error() is None
    drained("m")
    assert site.states("m") == {1: ("READY", "")}


def test_unload_of_a_failed_model_settles_it(site: Site) -> None:
    site.model("m", {1: "crash"})
    agent = site.agent()
    with pytest.raises(InvalidArgumentError):
        agent.load("m", {})
    agent.unload("m", False)
    assert site.states("m") == {1: ("UNAVAILABLE", "unloaded")}
    assert agent.ready()


def test_loads_of_one_model_follow_one_another(site: Site) -> None:
    site.model("m", {1: "slowly"})
    agent = site.agent()
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(agent.load, "m", {}) for _ in range(4)]
        assert site.backend.loading.acquire(timeout=PATIENCE_S)
        assert site.states("m") == {1: ("LOADING", "")}
        site.backend.gate.set()
        for load in loads:
            load.result(PATIENCE_S)
    assert site.loads() == ["m:1"]


@pytest.mark.parametrize(("threads", "at_once"), [(1, 1), (2, 2), (4, 3)])
def test_models_load_side_by_side(site: Site, threads: int, at_once: int) -> None:
    for name in ("a", "b", "c"):
        site.model(name, {1: "slowly"})
    agent = site.agent("none", load_threads=threads)
    starter = threading.Thread(target=agent.start)
    starter.start()
    for _ in range(at_once):
        assert site.backend.loading.acquire(timeout=PATIENCE_S)
    assert not site.backend.loading.acquire(timeout=0.05)
    site.backend.gate.set()
    starter.join(PATIENCE_S)
    assert sorted(site.loads()) == ["a:1", "b:1", "c:1"]


def test_override(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    config = json.dumps(
        {
            "backend": "echo",
            "max_batch_size": 2,
            "input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],
        }
    )
    agent.load("m", {"config": config})
    assert site.serving("m")[1].spec.max_batch_size == 2
    agent.load("m", {})  # the files are what they were, so the override stays
    assert site.serving("m")[1].spec.max_batch_size == 2
    agent.load("m", {"config": config})
    assert len(site.loads()) == 2
    agent.unload("m", False)
    agent.load("m", {})
    assert site.serving("m")[1].spec.max_batch_size == 0


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "Invalid config override: "),
        ('{"max_batch": 1}', "did you mean 'max_batch_size'?"),
        ('{"name": "other"}', "Could not determine backend for model 'm'"),
        (
            '{"name": "other", "backend": "echo"}',
            "unexpected directory name 'm' for model 'other', directory name must equal",
        ),
        ('{"max_batch_size": -1, "backend": "echo"}', "'max_batch_size' must be non-negative value for m"),
    ],
)
def test_bad_override(site: Site, config: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", {})
    with pytest.raises(InternalError, match="failed to poll from model repository"):
        agent.load("m", {"config": config})
    assert reason in caplog.text
    assert site.send("m").error() is None


def test_close_answers_what_cannot_finish(site: Site) -> None:
    site.model("m", {1: "slow"})
    agent = site.agent()
    agent.load("m", {})
    running, queued = site.send("m"), site.send("m")
    assert not agent.close(0.05)
    error = queued.error()
    assert isinstance(error, UnavailableError)
    assert error.message == "Server exiting"
    assert running.pending
    site.backend.gate.set()
    assert running.error() is None
    with pytest.raises(UnavailableError, match="Server exiting"):
        agent.load("m", {})


def test_close_does_not_wait_for_a_load_that_hangs(site: Site) -> None:
    site.model("m", {1: "slowly"})
    agent = site.agent()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(agent.load, "m", {})
        assert site.backend.loading.acquire(timeout=PATIENCE_S)
        assert not agent.close(0.05)
        site.backend.gate.set()
        with pytest.raises(UnavailableError, match="Server exiting"):
            load.result(PATIENCE_S)
    assert site.backend.placements == []  # it stopped before its next step
    assert site.serving("m") == {}


SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 }"


def test_a_live_sequence_ends_on_the_version_that_began_it(site: Site) -> None:
    site.model("m", config=site.config(SEQUENCES))
    agent = site.agent()
    agent.load("m", {})
    old = site.serving("m")[1]
    assert site.send_in_sequence("m", 5, start=True).error() is None
    site.model("m", {1: "another"}, site.config(SEQUENCES))
    agent.load("m", {})
    new = site.serving("m")[1]
    assert new is not old
    assert site.registry.draining == {"m": (old,)}
    assert site.send_in_sequence("m", 5).error() is None
    assert site.send_in_sequence("m", 6, start=True, end=True).error() is None
    assert [old.statistics.snapshot().inference_count, new.statistics.snapshot().inference_count] == [2, 1]
    assert site.backend.closed == []
    assert site.send_in_sequence("m", 5, end=True).error() is None
    drained("m")
    assert site.backend.closed == ["m:1"]
    assert not site.registry.draining
    with pytest.raises(InvalidArgumentError, match="must specify the START flag"):
        site.send_in_sequence("m", 5)


def test_a_live_sequence_of_an_unloaded_model_may_end(site: Site) -> None:
    site.model("m", config=site.config(SEQUENCES))
    agent = site.agent()
    agent.load("m", {})
    assert site.send_in_sequence("m", 5, start=True).error() is None
    agent.unload("m", False)
    with pytest.raises(NotFoundError):
        site.send_in_sequence("m", 6, start=True)
    assert site.send_in_sequence("m", 5, end=True).error() is None
    drained("m")
    assert site.states("m") == {1: ("UNAVAILABLE", "unloaded")}


def test_a_sequence_that_nobody_ends_does_not_keep_an_old_version_for_ever(site: Site) -> None:
    site.model("m", config=site.config(SEQUENCES.replace("60000000", "30000")))
    agent = site.agent()
    agent.load("m", {})
    assert site.send_in_sequence("m", 5, start=True).error() is None
    agent.unload("m", False)
    drained("m")
    assert site.backend.closed == ["m:1"]


def test_a_server_that_stops_does_not_wait_for_sequences_beyond_its_limit(site: Site) -> None:
    site.model("m", config=site.config(SEQUENCES))
    agent = site.agent()
    agent.load("m", {})
    assert site.send_in_sequence("m", 5, start=True).error() is None
    assert not agent.close(0.01)
    drained("m")
    assert site.backend.closed == ["m:1"], "given up, so that the model could close after all"
