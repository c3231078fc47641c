"""The agent as planners and operators see it."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from google.protobuf import json_format, text_format
from tests.conch_control.unit.test_model_lifecycle import drained
from tests.support.waiting import PATIENCE_S

from conch.core.errors import ConchError, NotFoundError
from conch.core.execution.placement import Devices
from conch.core.registry import Registry
from conch.core.server_state import ServerState
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.agent_api import AgentApi, InstanceStatus
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.lifecycle.agent import Agent
from conch_control.version_phase import Phase

if TYPE_CHECKING:
    from tests.support.sites import Site

ALL = "version_policy { all {} }"


def test_an_agent_is_an_agent_port(site: Site) -> None:
    port: AgentApi = site.agent()
    assert port.models().revision == 0


def test_models(site: Site) -> None:
    site.model("m", {1: "ok", 2: "crash boom"}, site.config(ALL))
    site.model("idle")
    agent = site.agent()
    with pytest.raises(ConchError):
        agent.load("m", {})
    index = agent.models()
    assert (index.epoch, index.revision) == (agent.events.epoch, agent.events.revision)
    idle, model = index.models
    assert (idle.name, idle.versions, idle.reason) == ("idle", (), "")
    assert model.location == str(site.repository / "m")
    assert [(each.version, each.phase, each.reason) for each in model.versions] == [
        (1, Phase.UNLOADED, "unloaded"),
        (2, Phase.FAILED, "Internal: boom"),
    ]
    assert all(each.seconds > 1e9 for each in model.versions)
    site.model("m", {2: "ok"})
    agent.load("m", {})
    site.remove("m")
    assert agent.models().models[1].location == "", "it serves without being in the repository"


def test_models_that_never_came_to_a_version(site: Site) -> None:
    site.model("m", config="nonsense")
    agent = site.agent()
    with pytest.raises(ConchError):
        agent.load("m", {})
    (model,) = agent.models().models
    assert model.versions == ()
    assert "no field named" in model.reason
    (event,) = agent.events.after(0)
    assert (event.model, event.version, event.phase, event.reason) == ("m", 0, Phase.FAILED, model.reason)
    agent.unload("m", False)
    assert agent.models().models[0].reason == ""


def test_a_reader_of_events_is_woken(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    seen: list[Phase] = []

    def follow() -> None:
        revision = 0
        while events := agent.events.after(revision, PATIENCE_S):
            seen.extend(event.phase for event in events)
            revision = events[-1].revision

    reader = threading.Thread(target=follow)
    reader.start()
    agent.load("m", {})
    agent.unload("m", False)
    drained("m")
    assert agent.close(PATIENCE_S)
    reader.join(PATIENCE_S)  # closing ended its wait
    assert [phase.value for phase in seen] == ["STAGING", "LOADING", "READY", "DRAINING", "UNLOADED"]


def test_describe(site: Site) -> None:
    groups = (
        'instance_group { name: "c" kind: KIND_CPU count: 2 }',
        'instance_group { name: "g" kind: KIND_GPU gpus: [0, 2] }',
    )
    site.model("m", {1: "ok", 2: "ok"}, site.config(ALL, *groups))
    agent = site.agent(devices=Devices((0, 1, 2), 7.0))
    assert agent.describe("m").config_json == ""
    assert agent.describe("m").instances == ()
    agent.load("m", {})
    description = agent.describe("m")
    assert [version.phase for version in description.status.versions] == [Phase.READY, Phase.READY]
    config = json.loads(description.config_json)
    assert (config["name"], config["backend"], config["instance_group"][0]["count"]) == ("m", "echo", 2)
    assert description.instances == (
        InstanceStatus("c", "KIND_CPU", -1, 2),
        InstanceStatus("g", "KIND_GPU", 0, 1),
        InstanceStatus("g", "KIND_GPU", 2, 1),
    )
    origins = description.origins
    assert (origins["backend"], origins["instance_group[0].count"]) == ("config.pbtxt", "config.pbtxt")
    assert (origins["name"], origins["instance_group[1].count"]) == ("default", "default")
    override = ModelConfig()
    text_format.Parse(site.config(), override)
    agent.load("m", {"config": json_format.MessageToJson(override, preserving_proto_field_name=True)})
    assert agent.describe("m").origins["backend"] == "override"
    with pytest.raises(NotFoundError, match="unknown model: 'ghost' is not found"):
        agent.describe("ghost")


def test_drain_makes_the_server_not_ready_and_nothing_else(site: Site) -> None:
    site.model("m")
    registry = Registry()
    drained = threading.Event()
    options = ControlOptions(repositories=(site.repository,))
    agent = Agent(options, registry, site.get_backend, on_drain=drained.set)
    core = ServerState(registry, GuardedAgent(agent, "none"), "id", "1", agent.ready)
    assert agent.start() == []
    core.started()
    agent.drain()
    assert drained.is_set()
    before = core.ready
    core.drain()
    assert (before, core.ready, core.live) == (True, False, True)
    assert core.model("m").spec.name == "m"
    assert agent.close(PATIENCE_S)
