"""All planted faults can be planted; what finds them is tested by ``make faults``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts import planted_faults as planted

FAULT = planted.Fault("a fault", "an area", "code.py", "1 + 1", "1 - 1", ("test_it.py::test_it",))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text("TWO = 1 + 1\nTHREE = 1 + 2\n")
    (tmp_path / "code.c").write_text("int two = 1 + 1;\n")
    (tmp_path / "test_it.py").touch()
    return tmp_path


def test_all_faults_can_be_planted() -> None:
    faults = planted.load(planted.ROOT)
    assert not planted.mistakes(planted.ROOT, faults)
    assert len(faults) >= planted.LEAST_FAULTS


def test_a_fault_replaces_its_text(checkout: Path) -> None:
    assert not planted.mistakes(checkout, [FAULT, replace(FAULT, file="code.c")])
    assert planted.planted(checkout, FAULT) == "TWO = 1 - 1\nTHREE = 1 + 2\n"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"old": "1 + 3"}, "occurs 0 times in code.py"),
        ({"old": "1 +"}, "occurs 2 times in code.py"),
        ({"file": "gone.py"}, "occurs 0 times in gone.py"),
        ({"new": "1 + 1"}, "changes nothing"),
        ({"new": "1 +"}, "invalid syntax"),
        ({"tests": ("test_gone.py",)}, "there is no test_gone.py"),
        ({"tests": ()}, "names no test"),
    ],
)
def test_a_fault_that_can_not_be_planted_is_found(checkout: Path, changes: dict[str, Any], says: str) -> None:
    (found,) = planted.mistakes(checkout, [replace(FAULT, **changes)])
    assert says in found


def test_the_table_says_what_finds_each_fault() -> None:
    found = planted.Finding(FAULT, "test", "tests/unit/test_it.py::test_it[a|b]")
    lost = planted.Finding(replace(FAULT, name="another fault"), "nothing", "")
    first, *_, second, third = planted.table([found, lost]).splitlines()
    assert first == "2 faults: `make test` finds 1, `make test-all` 1."
    assert second == "| an area | a fault | `code.py` | test | `test_it.py::test_it[a\\|b]` |"
    assert third == "| an area | another fault | `code.py` | nothing |  |"
