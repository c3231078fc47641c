"""Messages of a start: loads that take long, ports that are taken, repositories that are none."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.servers import eventually

from conch.process.start_diagnostics import SlowLoads, cause_line, hint_for, listener_of, repository_hint
from conch_control.agent_api import ModelStatus, VersionStatus
from conch_control.version_phase import Phase


def test_slow_loads_say_what_they_are_doing(caplog: pytest.LogCaptureFixture) -> None:
    versions = (
        VersionStatus(1, Phase.STAGING, seconds=time.time() - 65, done_bytes=1, total_bytes=4),
        VersionStatus(2, Phase.WARMING, seconds=time.time()),
        VersionStatus(3, Phase.READY),
    )
    asked: list[int] = []

    def loads() -> list[ModelStatus]:
        asked.append(caplog.text.count("version 2"))
        return [ModelStatus("m", "", versions)]

    slow = SlowLoads(loads, 0.001)
    with caplog.at_level(logging.INFO):
        slow.start()
        eventually(lambda: len(asked) > 16, "it looks again and again")
        slow.stop()
    # After the second look, the fourth, the eighth and the sixteenth.
    assert asked[:17] == [0, 0, 1, 1, 2, 2, 2, 2, *[3] * 8, 4]
    assert (
        "still loading 'm' version 1: its files are fetched, 25 % of 4 bytes, for 65 s so far" in caplog.text
    )
    assert "still loading 'm' version 2: its warm-up samples run, for 0 s so far" in caplog.text
    assert "version 3" not in caplog.text


def test_a_cause_is_one_line_with_its_hint() -> None:
    missing = "Internal: No module named 'sklearn.linear_model'"
    line = cause_line("m", f"load failed for model 'm': version 1 is at UNAVAILABLE state: {missing};\n")
    assert line == f"failed to load 'm': version 1: {missing} (hint: {hint_for(missing)})"
    assert hint_for("No module named 'sklearn.linear_model'").startswith(
        "name the package of 'sklearn' in a req"
    )
    assert hint_for("no weights") == ""
    assert cause_line("m", "no\nweights") == "failed to load 'm': no weights"


def test_who_listens_on_a_port() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert listener_of(port).startswith(f"pid {os.getpid()} (")
    assert listener_of(port) == ""


@pytest.mark.parametrize(
    ("files", "given", "parent"),
    [
        (["m/config.pbtxt"], "m", "."),
        (["m/1/model.onnx"], "m", "."),
        (["m/1/model.py"], "m/1", "."),
        (["m/1/model.py", "m/config.pbtxt"], ".", None),
        (["1/config.pbtxt", "1/1/model.py"], ".", None),
        ([], "nowhere", None),
    ],
)
def test_a_model_given_as_a_repository(
    tmp_path: Path, files: list[str], given: str, parent: str | None
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    hint = repository_hint(str(tmp_path / given))
    if parent is None:
        assert hint == ""
    else:
        assert hint.endswith(f"name its parent, --model-repository={tmp_path / parent}")
