"""Messages of a fleet to its servers about rollouts, over their control ports."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.agents import FakeAgent
from tests.support.control_ports import served
from tests.support.servers import WAIT_S, eventually
from tests.support.sites import Site

from conch.core.errors import FailedPreconditionError, InvalidArgumentError
from conch.core.rollouts import RolloutTransition
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions
from conch_control.remote_api.remote_agent import RemoteAgent
from conch_control.repository.local import LocalModel
from conch_fleet.fleet_rollouts import FleetRollouts


class Picky(FakeAgent):
    """Refuses the rollouts of one model."""

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        if name == "refused":
            raise InvalidArgumentError("rollout.sticky: is not known here")
        return super().manage_rollout(name, declaration, managed_by)


class Models:
    """Models in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def source(self, model: str) -> LocalModel:
        return LocalModel(self._directory / model)

    def rollout_changed(self, model: str, transition: RolloutTransition) -> None:
        """Shows it to no one."""


def test_a_server_that_refuses_one_model_hears_of_the_others(tmp_path: Path) -> None:
    for name in ("refused", "other"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").touch()
        (tmp_path / name / "rollout.toml").write_text('[rollout]\nsteps = ["50% 1h"]\n')
    agent = Picky()
    with served(agent) as (_, target):
        remote = RemoteAgent(ModelControlClient(ConnectionOptions(target), timeout_s=WAIT_S))
        rollouts = FleetRollouts([remote], Models(tmp_path), 60.0, None)
        with closing(rollouts), closing(remote):
            rollouts.start()
            rollouts.declare("refused")
            rollouts.declare("other")
            eventually(lambda: "other" in agent.reports, "it hears of the other")
            assert "refused" not in agent.reports
            rollouts.stop()


def test_what_is_held_out_stays_so_on_all_servers_without_its_rollout(site: Site) -> None:
    declared = site.model("m") / "rollout.toml"
    declared.write_text('[rollout]\nsteps = ["50% 1h"]\n')
    agent = site.agent()
    agent.load("m", {})
    with served(agent) as (_, target):
        remote = RemoteAgent(ModelControlClient(ConnectionOptions(target), timeout_s=WAIT_S))
        rollouts = FleetRollouts([remote], Models(site.repository), 6.0, None)
        with closing(rollouts), closing(remote):
            rollouts.start()
            site.model("m", {2: "ok"}, None)
            rollouts.declare("m")
            eventually(lambda: agent.rollout("m").state == "STEP", "the candidate gets requests")
            rollouts.update_rollout("m", "abort")
            eventually(lambda: agent.rollout("m").state == "ABORTED", "the candidate is unloaded")
            declared.unlink()
            rollouts.declare("m")
            assert rollouts.rollout("m").refused == (2,)
            eventually(lambda: agent.rollout("m").state == "IDLE", "the server follows")
            agent.load("m", {})
            assert ([*site.serving("m")], agent.rollout("m").refused) == ([1], (2,))
            agent.update_rollout("m", "delete")  # takes it from the manager
            agent.load("m", {})
            assert ([*site.serving("m")], agent.rollout("m").refused) == ([1], (2,))
            site.model("m", {2: "ok "}, None)
            rollouts.declare("m")
            agent.load("m", {})
            eventually(lambda: site.serving("m").keys() == {2}, "other files are free")
            rollouts.stop()


def test_a_call_starts_a_rollout_of_a_model_that_had_none(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", {})
    site.model("m", {2: "ok"}, None)
    with served(agent) as (_, target):
        remote = RemoteAgent(ModelControlClient(ConnectionOptions(target), timeout_s=WAIT_S))
        rollouts = FleetRollouts([remote], Models(site.repository), 6.0, None)
        with closing(rollouts), closing(remote):
            rollouts.start()
            with pytest.raises(FailedPreconditionError, match="version 3 is not in the repository"):
                rollouts.start_rollout("m", {"rollout": {"candidate": 3}}, False)
            eventually(lambda: not agent.rollouts(), "the server has none of its own")
            rollouts.start_rollout("m", {"rollout": {"candidate": 2, "steps": ["50% 1h"]}}, False)
            eventually(lambda: [each.state for each in agent.rollouts()] == ["STEP"], "it begins")
            assert (agent.rollout("m").stable, rollouts.rollout("m").stable) == (1, 1)
            rollouts.stop()
