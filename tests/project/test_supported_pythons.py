"""Every supported Python: its pins, its environment of make, and the run of the quick tests on each."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from scripts import test_pythons as runs

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def pins(python: str) -> dict[str, list[str]]:
    """The pins of each package that hold for a Python."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            one = Requirement(line)
            pinned = found.setdefault(one.name, [])
            if one.marker is None or one.marker.evaluate({"python_version": python}):
                pinned.append(str(one.specifier))
    return found


def test_each_package_has_one_version_for_each_python() -> None:
    assert PYTHONS[0] == "3.11" and len(PYTHONS) > 1
    for python in PYTHONS:
        assert {name: found for name, found in pins(python).items() if len(found) != 1} == {}
    assert pins("3.11")["xgboost-cpu"] != pins("3.12")["xgboost-cpu"]


def test_the_pages_name_the_pythons_of_the_classifiers() -> None:
    for page in ("README.md", "docs/status.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in text, page


def interpreter(path: Path, version: str) -> str:
    """A program that says that it is a Python of a version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.process
def test_make_refuses_an_environment_of_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHON", "MAKEFLAGS", "MAKEOVERRIDES"):  # of a make that runs the tests
        monkeypatch.delenv(name, raising=False)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    interpreter(tmp_path / ".venv" / "bin" / "python", "3.11.7")
    same = interpreter(tmp_path / "same", "3.11.7")
    other = interpreter(tmp_path / "other", "3.13.0")

    def makes(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--dry-run", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)

    for arguments in (["serve"], ["serve", f"PYTHON={same}"], ["clean", f"PYTHON={other}"]):
        assert makes(*arguments).returncode == 0
    refused = makes("serve", f"PYTHON={other}")
    assert refused.returncode != 0
    assert f".venv is of Python 3.11.7, {other} is 3.13.0: remove .venv first" in refused.stderr
    assert "none that runs" in makes("serve", f"PYTHON={tmp_path}/missing").stderr


@pytest.mark.process
def test_pythons_are_those_of_the_path_and_of_pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{tmp_path}/empty")
    monkeypatch.setenv("PYENV_ROOT", f"{tmp_path}/pyenv")
    first = interpreter(tmp_path / "bin" / "python3.11", "3.11.2")
    interpreter(tmp_path / "bin" / "python3.20", "3.20.1")
    pyenv = tmp_path / "pyenv" / "versions"
    for name, version in (("old", "3.9.1"), ("new", "3.13.0"), ("same", "3.11.2")):
        interpreter(pyenv / name / "bin" / "python3", version)
    found = runs.interpreters([])
    assert list(found) == ["3.11.2", "3.13.0", "3.20.1"]
    assert found["3.11.2"] == first
    assert list(runs.interpreters([first])) == ["3.11.2"]
    with pytest.raises(SystemExit, match="lost is no Python"):
        runs.interpreters(["lost"])


def test_needed_packages_are_those_of_all_extras() -> None:
    extras = {"dev": ["conch[a,lint]", "d>=1"], "a": ["conch[b]", "a[x,y]>=1"], "b": ["d>=1"], "lint": ["l"]}
    assert runs.requirements(extras) == ["d>=1", "a[x,y]>=1"]


def test_results_name_failures_and_the_reasons_of_skips(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="passes"/>'
        '<testcase classname="a" name="fails"><failure message="no"/></testcase>'
        '<testcase classname="a" name="breaks"><error message="no"/></testcase>'
        '<testcase classname="b" name="one"><skipped message="needs torch"/></testcase>'
        '<testcase classname="b" name="two"><skipped message="needs torch">f.py:9</skipped></testcase>'
        '<testcase classname="" name="b.c"><skipped message="collection skipped">'
        "('b/c.py', 9, \"Skipped: could not import 'torch': No module named 'torch'\")</skipped></testcase>"
        "</testsuite></testsuites>"
    )
    outcomes, skips, failed = runs.results(report)
    assert outcomes == {"passed": 1, "failed": 2, "skipped": 3}
    assert skips == {"needs torch": 2, "could not import 'torch': No module named 'torch'": 1}
    assert failed == ["a::fails", "a::breaks"]
