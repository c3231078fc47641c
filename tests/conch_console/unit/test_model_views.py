"""Models as the console's pages get them."""

from __future__ import annotations

from tests.support.agents import FakeAgent

from conch.core.model_control import NOT_RESIDENT
from conch.core.registry import Registry
from conch_console.model_views import ModelViews
from conch_control.agent_api import Index, ModelStatus, VersionStatus
from conch_control.version_phase import Phase


class Catalogue(FakeAgent):
    """Has a model with labels, one that no request has loaded yet, and a broken one."""

    def models(self) -> Index:
        versions = (VersionStatus(1, Phase.READY), VersionStatus(2, Phase.READY))
        labels = {"stable": 1, "champion": 1, "next": 2}
        statuses = (
            ModelStatus("labelled", "", versions, labels=labels),
            ModelStatus("cold", "", reason=NOT_RESIDENT),
            ModelStatus("broken", "", reason="no config"),
        )
        return Index(self.events.epoch, 0, statuses)


def test_versions_have_labels_and_cold_models_have_not_failed() -> None:
    labelled, cold, broken = ModelViews(Catalogue(), Registry()).all()["models"]
    assert [each["labels"] for each in labelled["versions"]] == [["champion", "stable"], ["next"]]
    assert (cold["reason"], broken["reason"]) == ("", "no config")
