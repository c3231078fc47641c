"""Flags of residency on demand."""

from __future__ import annotations

import pytest

from conch.cli.settings.settings_reader import read_flags
from conch.server_settings import build_options
from conch.settings.option import FlagError
from conch_residency.residency_settings import ResidencySettings


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--resident-models=3"], "--resident-models has an effect only with --model-control-mode=on-demand"),
        (
            ["--model-control-mode=on-demand", "--model-namespacing"],
            "--model-namespacing can't be used with --model-control-mode=on-demand",
        ),
        (
            ["--resident-memory=0%"],
            "argument --resident-memory: must be bytes, or from 1% to 100%, got '0%'",
        ),
        (
            ["--resident-memory=8GB"],
            "argument --resident-memory: must be bytes above 0, or a percentage such as 80%, got '8GB'",
        ),
    ],
)
def test_settings_of_residency_that_are_wrong_or_have_no_effect(flags: list[str], text: str) -> None:
    with pytest.raises(FlagError) as caught:
        build_options(read_flags(flags, {}))
    assert str(caught.value) == text


def test_the_memory_of_residency_may_be_a_share() -> None:
    mode = "--model-control-mode=on-demand"
    given: tuple[list[str], ...] = (["--resident-memory=25%"], ["--resident-memory=123"], [])
    options = [build_options(read_flags([mode, *each], {})).residency for each in given]
    assert [isinstance(each, ResidencySettings) and each.budget(1000) for each in options] == [250, 123, 800]
