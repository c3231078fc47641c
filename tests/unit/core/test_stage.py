"""The stages of a server's life."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conch.core.stage import Life, Stage


@given(st.lists(st.sampled_from(Stage)))
def test_life_goes_forward_only(asked: list[Stage]) -> None:
    life = Life()
    for stage in asked:
        before = life.stage
        assert life.advance(stage) is (stage > before)
        assert life.stage is max(stage, before)


def test_how_long_a_stage_has_lasted() -> None:
    now = [5_000_000_000]
    life = Life(lambda: now[0])
    assert life.seconds_in(Stage.DRAINING) == 0
    life.advance(Stage.DRAINING)
    now[0] += 1_500_000_000
    assert life.seconds_in(Stage.DRAINING) == 1.5
    life.advance(Stage.DRAINING)
    life.advance(Stage.STOPPING)
    now[0] += 1_000_000_000
    assert life.seconds_in(Stage.DRAINING) == 2.5
    assert life.seconds_in(Stage.SERVING) == 0
