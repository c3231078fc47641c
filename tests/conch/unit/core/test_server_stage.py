"""The stages of a server's stages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conch.core.server_stage import ServerStages, Stage


@given(st.lists(st.sampled_from(Stage)))
def test_life_goes_forward_only(asked: list[Stage]) -> None:
    stages = ServerStages()
    for stage in asked:
        before = stages.stage
        assert stages.advance(stage) is (stage > before)
        assert stages.stage is max(stage, before)


def test_how_long_a_stage_has_lasted() -> None:
    now = [5_000_000_000]
    stages = ServerStages(lambda: now[0])
    assert stages.seconds_in(Stage.DRAINING) == 0
    stages.advance(Stage.DRAINING)
    now[0] += 1_500_000_000
    assert stages.seconds_in(Stage.DRAINING) == 1.5
    stages.advance(Stage.DRAINING)
    stages.advance(Stage.STOPPING)
    now[0] += 1_000_000_000
    assert stages.seconds_in(Stage.DRAINING) == 2.5
    assert stages.seconds_in(Stage.SERVING) == 0
