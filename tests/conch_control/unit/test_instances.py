"""Loads that change how many instances a model has, and limits on their rates."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from tests.conch_control.unit.test_model_lifecycle import drained
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.execution.placement import Devices
from conch.core.model_version import Model
from conch.core.scheduling.resource_scheduler import ResourceLimit
from conch.core.scheduling.scheduler import Batch
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.model_definition import read_definition
from conch_control.lifecycle.model_loader import ModelLoader

if TYPE_CHECKING:
    from tests.support.sites import Site

    from conch_control.lifecycle.agent import Agent

ALL = "version_policy { all {} }"


def names(site: Site) -> list[str]:
    """Instances made so far; forgets them."""
    made = [placement.name for placement in site.backend.placements]
    site.backend.placements.clear()
    return made


def counts(model: object) -> list[int]:
    """Instance counts that the config of a model shows."""
    assert isinstance(model, Model)
    config = ModelConfig.FromString(model.spec.config_message)
    groups = model.spec.config["instance_group"]
    assert isinstance(groups, list)
    shown = [group.count for group in config.instance_group]
    assert [group["count"] for group in groups] == shown
    assert [group.count for group in model.spec.instance_groups] == shown
    return shown


def loaded(site: Site, config: str, **model: Any) -> Agent:
    """An agent that has loaded a model with a config."""
    site.model("m", config=site.config(config), **model)
    agent = site.agent()
    agent.load("m", {})
    return agent


def reload(site: Site, agent: Agent, config: str) -> bool:
    """Loads with another config; whether the versions that served go on."""
    before = site.serving("m")
    site.model("m", versions={}, config=site.config(config))
    agent.load("m", {})
    return site.serving("m") == before


def test_another_count_is_no_reload(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    agent = loaded(site, "instance_group { count: 2 }")
    assert names(site) == ["m_0_0", "m_0_1"]
    answer = site.send("m")
    assert answer.error() is None
    with caplog.at_level(logging.INFO):
        assert reload(site, agent, "instance_group { count: 4 }")
    assert "changed the instances of 'm'" in caplog.messages
    assert names(site) == ["m_0_2", "m_0_3"]
    assert counts(site.serving("m")[1]) == [4]
    assert site.loads() == ["m:1"]
    assert site.serving("m")[1].statistics.snapshot().success.count == 1
    assert reload(site, agent, "instance_group { count: 1 }")
    drained("m")
    assert site.backend.closed == ["m:1"] * 3
    assert counts(site.serving("m")[1]) == [1]
    assert site.send("m").error() is None
    agent.load("m", {})  # unmodified
    assert names(site) == []


def test_a_load_returns_when_the_instances_that_go_have_been_closed(site: Site) -> None:
    agent = loaded(site, "instance_group { count: 2 }", versions={1: "slow"})
    answers = [site.send("m") for _ in range(4)]
    for _ in range(2):  # else the one that goes may have nothing to finish
        assert site.backend.waiting.acquire(timeout=WAIT_S)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(reload, site, agent, "instance_group { count: 1 }")
        eventually(lambda: counts(site.serving("m")[1]) == [1], "the change is made")
        assert not load.done()
        assert site.backend.closed == []
        site.backend.gate.set()
        assert load.result(WAIT_S)
        assert site.backend.closed == ["m:1"]
    for answer in answers:
        assert answer.error() is None


def test_a_model_may_take_away_the_instance_that_it_runs_on(site: Site) -> None:
    agent = loaded(site, "instance_group { count: 2 }")
    both = threading.Barrier(2)
    done: list[bool] = []

    def execute(batch: Batch) -> None:
        if both.wait(WAIT_S) == 0:  # one of the two asks, while the other is still at it
            site.model("m", versions={}, config=site.config("instance_group { count: 1 }"))
            assert site.backend.calls is not None
            site.backend.calls.load("m", {})
            done.append(True)
        both.wait(WAIT_S)

    site.backend.on_execute = execute
    answers = [site.send("m"), site.send("m")]
    for answer in answers:
        assert answer.error() is None
    assert done == [True]
    eventually(lambda: site.backend.closed == ["m:1"], "the other instance is closed")
    agent.load("m", {})


def test_an_unload_while_a_busy_instance_goes(site: Site) -> None:
    agent = loaded(site, "instance_group { count: 2 }", versions={1: "slow"})
    answers = [site.send("m") for _ in range(4)]
    for _ in range(2):
        assert site.backend.waiting.acquire(timeout=WAIT_S)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(reload, site, agent, "instance_group { count: 1 }")
        eventually(lambda: counts(site.serving("m")[1]) == [1], "the change is made")
        agent.unload("m", False)
        load.result(WAIT_S)  # it waits no longer
    assert site.backend.closed == []
    site.backend.gate.set()
    for answer in answers:
        assert answer.error() is None
    drained("m")
    assert site.backend.closed == ["m:1"] * 2
    assert site.states("m") == {1: ("UNAVAILABLE", "unloaded")}


TWO = "instance_group { count: 2 }"


@pytest.mark.parametrize("more", ["", "sequence_batching {}"])
@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (TWO, 'instance_group { name: "other" count: 2 }', [2]),
        (TWO, 'instance_group {} instance_group { name: "m_0" }', [1, 1]),
        ('instance_group { name: "a" } instance_group { name: "b" }', "instance_group { count: 2 }", [2]),
        ("instance_group { count: 1 }", "instance_group { count: 0 }", [1]),
        ("instance_group { count: 1 }", "", [1]),
    ],
)
def test_other_names_and_groups_of_the_same_instances(
    site: Site, more: str, before: str, after: str, shown: list[int]
) -> None:
    agent = loaded(site, before + more)
    names(site)
    assert reload(site, agent, after + more)
    assert names(site) == []
    assert site.backend.closed == []
    assert counts(site.serving("m")[1]) == shown
    assert site.loads() == ["m:1"]
    if not more:
        assert reload(site, agent, "instance_group { count: 4 }")
        assert len(names(site)) == 4 - sum(shown)


@pytest.mark.parametrize("count", [1001, 2_000_000_000])
def test_more_instances_than_a_model_may_have(site: Site, count: int) -> None:
    site.model("m", config=site.config(f"instance_group {{ count: {count} }}"))
    with pytest.raises(
        InvalidArgumentError, match=rf"ask for {count} instances, .* at most 1000; lower 'count'"
    ):
        site.agent().load("m", {})
    assert site.loads() == names(site) == []


def test_a_load_stops_before_the_next_instance(site: Site) -> None:
    site.model("m", config=site.config("instance_group { count: 1000 }"), versions={1: "slow instances"})
    agent = site.agent()
    with ThreadPoolExecutor() as pool:
        load = pool.submit(agent.load, "m", {})
        assert site.backend.loading.acquire(timeout=WAIT_S)
        agent.unload("m", False)
        site.backend.gate.set()
        with pytest.raises(UnavailableError, match="current load operation is out-dated"):
            load.result(WAIT_S)
    assert len(site.backend.placements) == 1
    assert site.backend.closed == ["m:1"]


def test_the_default_group_and_one_that_is_written_are_the_same(site: Site) -> None:
    agent = loaded(site, "")
    assert names(site) == ["m_0"]
    assert reload(site, agent, "instance_group { count: 3 kind: KIND_CPU }")
    assert names(site) == ["m_0_1", "m_0_2"]
    assert counts(site.serving("m")[1]) == [3]


def test_a_config_override_that_changes_the_count_only(site: Site) -> None:
    agent = loaded(site, "")
    model = site.serving("m")[1]
    assert isinstance(model, Model)
    config = {**model.spec.config, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]}
    agent.load("m", {"config": json.dumps(config)})
    # The completed config is not the one that was written, but says the same.
    agent.load("m", {"config": json.dumps({**config, "instance_group": [{"count": 2, "kind": "KIND_CPU"}]})})
    assert counts(site.serving("m")[1]) == [2]
    agent.load("m", {})
    assert counts(site.serving("m")[1]) == [2], "the override stays in force"
    agent.unload("m", False)
    drained("m")
    agent.load("m", {})
    assert counts(site.serving("m")[1]) == [1]


def test_all_versions_or_none(site: Site) -> None:
    agent = loaded(site, ALL, versions={1: "ok", 2: "ok"})
    serving = site.serving("m")
    names(site)
    assert reload(site, agent, ALL + "instance_group { count: 2 }")
    assert [counts(model) for model in serving.values()] == [[2], [2]]
    assert len(names(site)) == 2
    site.backend.room = 0
    with pytest.raises(InvalidArgumentError) as raised:
        reload(site, agent, ALL + "instance_group { count: 3 }")
    assert raised.value.message == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Not found: no room for m_0_2;\n"
    )
    assert site.serving("m") == serving
    assert [counts(model) for model in serving.values()] == [[2], [2]]
    reason = "it goes on as it was, as its successor failed to load: Not found: no room for m_0_2"
    assert site.states("m") == {1: ("READY", reason), 2: ("READY", "")}
    assert site.send("m").error() is None
    site.backend.room = 9
    assert reload(site, agent, ALL + "instance_group { count: 3 }"), "what failed is tried again"
    assert [counts(model) for model in serving.values()] == [[3], [3]]


def test_what_was_made_for_one_version_goes_if_the_next_one_fails(site: Site) -> None:
    agent = loaded(site, ALL, versions={1: "ok", 2: "ok"})
    site.backend.room = 1
    with pytest.raises(InvalidArgumentError, match="version 2 is at UNAVAILABLE state: Not found"):
        reload(site, agent, ALL + "instance_group { count: 2 }")
    assert site.backend.closed == ["m:1"]
    assert [counts(model) for model in site.serving("m").values()] == [[1], [1]]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "instance_group { count: 1 }",
            "instance_group { count: 2 } max_batch_size: 0 parameters { key: 'a' }",
        ),
        ("instance_group { count: 1 }", "instance_group { count: 2 kind: KIND_MODEL }"),
        ("instance_group { count: 1 }", "instance_group { count: 2 passive: true } instance_group { }"),
        ("instance_group { count: 1 }", "instance_group { count: 2 rate_limiter { priority: 2 } }"),
    ],
)
def test_any_other_change_is_a_reload(site: Site, before: str, after: str) -> None:
    agent = loaded(site, before)
    assert not reload(site, agent, after)
    assert site.loads() == ["m:1", "m:1"]
    drained("m")


def test_an_order_is_kept_by_a_reload(site: Site) -> None:
    ordered = "max_batch_size: 4 dynamic_batching { preserve_ordering: true } instance_group { count: %d }"
    agent = loaded(site, ordered % 1)
    directory = site.model("m", config=site.config(ordered % 2))
    options = ControlOptions(repositories=(site.repository,))
    loader = ModelLoader(options, site.get_backend, site.registry)
    assert loader.resize(read_definition("m", directory, options), site.serving("m")[1]) is None
    agent.unload("m", False)
    drained("m")


def test_a_changed_file_is_a_reload(site: Site) -> None:
    agent = loaded(site, "")
    (site.repository / "m" / "1" / "model.echo").write_text("another")
    assert not reload(site, agent, "instance_group { count: 2 }")
    (site.repository / "m" / "labels.txt").write_text("a")
    assert not reload(site, agent, "instance_group { count: 3 }")
    drained("m")


def test_a_variant_of_the_config(site: Site) -> None:
    directory = site.model("m")
    (directory / "configs").mkdir()
    (directory / "configs" / "big.pbtxt").write_text(site.config("instance_group { count: 2 }"))
    agent = site.agent(model_config_name="big")
    agent.load("m", {})
    model = site.serving("m")[1]
    (directory / "configs" / "big.pbtxt").write_text(site.config("instance_group { count: 5 }"))
    agent.load("m", {})
    assert site.serving("m")[1] is model
    assert counts(model) == [5]


RATED = 'instance_group { count: %d rate_limiter { resources { name: "R" count: %d } } }'


@pytest.mark.parametrize(
    ("limits", "concurrent"), [(None, True), ((), False), ((ResourceLimit("R", 2),), False)]
)
def test_rate_limits_apply_where_they_are_on(
    site: Site, limits: tuple[ResourceLimit, ...] | None, concurrent: bool
) -> None:
    site.model("m", {1: "slow"}, config=site.config(RATED % (2, 2)))
    site.agent(rate_limits=limits).load("m", {})
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(site.send, "m") for _ in range(2)]
        try:
            assert site.backend.waiting.acquire(timeout=WAIT_S)
            # With limits the first execution holds all of "R" until the gate opens.
            assert site.backend.waiting.acquire(timeout=WAIT_S if concurrent else 0.1) is concurrent
        finally:
            site.backend.gate.set()
        assert [future.result(WAIT_S).error() for future in sent] == [None, None]


def test_a_load_that_asks_for_too_much(site: Site) -> None:
    site.model("m", config=site.config(RATED % (1, 4)))
    site.model(
        "other", config=site.config('instance_group { rate_limiter { resources { name: "S" count: 1 } } }')
    )
    agent = site.agent(rate_limits=(ResourceLimit("R", 1),))
    prefix = "load failed for model '{}': version 1 is at UNAVAILABLE state: Invalid argument: "
    text = (
        'Resource count for "{}" is limited to {} which will prevent scheduling of one or more model '
        "instances, the minimum required count is {};\n"
    )
    for name, resource, limit, needed in (("m", "R", 1, 4), ("other", "S", 0, 1)):
        with pytest.raises(InvalidArgumentError) as raised:
            agent.load(name, {})
        assert raised.value.message == prefix.format(name) + text.format(resource, limit, needed)
    assert site.backend.placements == []


def test_a_reload_may_make_a_resource_a_shared_one(site: Site) -> None:
    site.model("m", config=site.config(RATED % (1, 1)))
    agent = site.agent(rate_limits=())
    agent.load("m", {})
    shared = 'instance_group { rate_limiter { resources { name: "R" count: 1 global: true } } }'
    site.model("m", config=site.config(shared))
    agent.load("m", {})
    drained("m")
    site.model("other", config=site.config(RATED % (1, 1)))
    with pytest.raises(InvalidArgumentError) as raised:
        agent.load("other", {})
    assert 'Resource "R" is present as both global and device-specific resource' in raised.value.message
    agent.unload("m", False)
    drained("m")
    agent.load("other", {})


def test_devices(site: Site) -> None:
    site.model("m", config=site.config("instance_group { count: 2 }"))
    site.model("old", config=site.config("instance_group { kind: KIND_GPU gpus: 1 }"))
    agent = site.agent(devices=Devices((0, 2), 7.0))
    agent.load("m", {})
    assert [(each.name, each.kind, each.device_id) for each in site.backend.placements] == [
        ("m_0_0", "GPU", 0),
        ("m_0_0", "GPU", 2),
        ("m_0_1", "GPU", 0),
        ("m_0_1", "GPU", 2),
    ]
    with pytest.raises(InvalidArgumentError, match=r"gpu id 1\. GPUs .* of 7\.000000 are: 0, 2"):
        agent.load("old", {})
