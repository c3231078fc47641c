"""The harness as a fixture, and a check that models leave nothing in the import system."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from tests.support.backend_harness import Harness

# pandas, where it is installed, has it put a finder into the import system.
import_module("six")


@pytest.fixture
def placement() -> str:
    """Place in which Python models run; parametrised by modules whose tests hold in both places."""
    return "in_process"


@pytest.fixture
def harness(tmp_path: Path, placement: str) -> Iterator[Harness]:
    before_path, before_modules, before_finders = list(sys.path), set(sys.modules), list(sys.meta_path)
    harness = Harness(tmp_path, placement)
    yield harness
    harness.close()
    assert sys.path == before_path
    assert sys.meta_path == before_finders
    came = {name: sys.modules.get(name) for name in set(sys.modules) - before_modules}
    assert not [name for name in came if name.startswith("conch_model_")]
    files = [getattr(module, "__file__", None) or "" for module in came.values()]
    assert not [file for file in files if file.startswith(str(tmp_path))]
