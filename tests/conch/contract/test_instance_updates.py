"""Loads that change the instances of Python models in place, and instances that are made side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.servers import client_of, serving, write_model

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
MODEL = """
import os
import time
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        self.notes = Path(args["model_repository"]).parent.parent / "notes"
        self.name = args["model_instance_name"]
        self.note("initializes")
        end = time.monotonic() + 300
        # The first two wait for each other.
        while len(self.read("initializes")) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(self.read("initializes")) >= 2, "it is alone"

    def note(self, what):
        with self.notes.open("a") as file:
            file.write(f"{what} {self.name}\\n")

    def read(self, what):
        return [line for line in self.notes.read_text().splitlines() if line.startswith(what)]

    def execute(self, requests):
        return []

    def finalize(self):
        self.note("begins")
        time.sleep(0.05)
        self.note("ends")
"""


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_instances_come_and_go(tmp_path: Path, placement: str) -> None:
    """Two initialize side by side; those that go have finalized, one by one, when the load returns."""
    repository, notes = tmp_path / "models", tmp_path / "notes"
    directory = write_model(repository, "m", None, {"model.py": MODEL})

    def change(groups: str) -> list[str]:
        (directory / "config.pbtxt").write_text(f"{CONFIG}{groups}")
        before = len(notes.read_text().splitlines()) if notes.exists() else 0
        client.load_model("m")
        return [line.split()[0] for line in notes.read_text().splitlines()[before:]]

    flags = [
        "--model-control-mode=explicit",
        "--disable-auto-complete-config",
        f"--backend-config=python,placement={placement}",
    ]
    with serving(repository, flags=flags) as server, client_of(server) as client:
        assert change("instance_group { count: 4 }") == ["initializes"] * 4
        assert change("instance_group { count: 3 } instance_group { name: 'other' }") == []
        assert change("instance_group { count: 1 }") == ["begins", "ends"] * 3
        assert change("instance_group { count: 0 }") == []
        assert change("instance_group { count: 2 }") == ["initializes"]
