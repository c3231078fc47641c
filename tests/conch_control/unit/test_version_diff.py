"""Differences between a load and the versions that serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.parse import parse_config
from conch_control.lifecycle.model_definition import Definition
from conch_control.lifecycle.version_diff import Origin, VersionAction, diff_versions
from conch_control.repository.layout import Fingerprint, versions_in

FILES = (
    *("config.pbtxt", "configs/", "configs/x.pbtxt", "labels.txt", "requirements.txt", "warmup/a"),
    *("1/", "1/m", "2/", "2/m", "2/requirements.txt"),
)
CONFIG = 'name: "m" backend: "echo"'


def origin(
    config: str = CONFIG,
    changed: str = "",
    without: str = "",
    location: str = "here",
    override: bool = False,
) -> Origin:
    state: Fingerprint = tuple(
        sorted(
            (path, 1, 2 if path == changed else 1, 1)
            for path in FILES
            if not (without and path.startswith(without))
        )
    )
    parsed: ModelConfig = parse_config(config, "here")
    definition = Definition("m", Path("/m"), parsed, tuple(versions_in(state)))
    return Origin(location, state, definition, override)


KEEP, RESIZE, LOAD = VersionAction.KEEP, VersionAction.RESIZE, VersionAction.LOAD
POLICY = "version_policy { all {} }"
GROUP = "instance_group { count: 2 }"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (origin(), (KEEP, KEEP)),
        (origin(changed="2/m"), (KEEP, LOAD)),
        (origin(without="2/"), (KEEP, LOAD)),
        (origin(changed="labels.txt"), (LOAD, LOAD)),
        (origin(changed="warmup/a"), (LOAD, LOAD)),
        (origin(changed="requirements.txt"), (LOAD, LOAD)),
        (origin(changed="2/requirements.txt"), (KEEP, LOAD)),
        (origin(changed="config.pbtxt"), (KEEP, KEEP)),
        (origin(changed="configs/x.pbtxt"), (KEEP, KEEP)),
        (origin(CONFIG + POLICY, changed="config.pbtxt"), (KEEP, KEEP)),
        (origin(CONFIG + GROUP, changed="config.pbtxt"), (RESIZE, RESIZE)),
        (origin(CONFIG + GROUP + POLICY, changed="2/m"), (RESIZE, LOAD)),
        (origin(CONFIG + "max_batch_size: 2"), (LOAD, LOAD)),
        (origin(override=True), (LOAD, LOAD)),
        (origin(CONFIG + GROUP, override=True), (RESIZE, RESIZE)),
        (origin(CONFIG + POLICY, override=True), (LOAD, LOAD)),
        (origin(location="there"), (LOAD, LOAD)),
    ],
)
def test_treatment(after: Origin, expected: tuple[VersionAction, VersionAction]) -> None:
    assert diff_versions(origin(), after, (1, 2)) == dict(zip((1, 2), expected, strict=True))


def test_versions_by_their_files() -> None:
    names = ("1/a", "12/", "007/x", "0/x", "x/1/", "5", "99999999999999999999/x")
    state: Fingerprint = tuple((name, 0, 0, 0) for name in names)
    assert versions_in(state) == [1, 12]
