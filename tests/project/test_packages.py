"""The import packages of the wheel, as `pyproject.toml` names them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import chain

import pytest
from scripts.try_installs import IMPORTS, install_lines, pip_command, promises
from tests.support.servers import ROOT

import conch
from conch.core.add_ons import server_packages

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages() -> set[str]:
    """All import packages of server and add-ons, as paths."""
    found = chain.from_iterable((ROOT / folder).glob("*/__init__.py") for folder in ("services", "control"))
    return {path.parent.relative_to(ROOT).as_posix() for path in found}


def test_all_packages_are_in_the_wheel() -> None:
    wheel = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) == packages()
    assert packages() <= set(wheel["only-include"])


def test_the_server_writes_the_logs_of_all_packages() -> None:
    logging = {
        path.rpartition("/")[2]
        for path in packages()
        if any("getLogger(" in module.read_text() for module in (ROOT / path).rglob("*.py"))
    }
    assert logging <= set(server_packages())


_OPTIONS = _PROJECT["project"]["entry-points"]["conch.options"].values()


@pytest.mark.process
@pytest.mark.parametrize("entry", _OPTIONS)
def test_an_add_on_is_imported_before_the_server(entry: str) -> None:
    """As its own tests do; the server finds it by an entry point, and they must not import each other."""
    module = entry.partition(":")[0]
    subprocess.run([sys.executable, "-c", f"import {module}, conch.server_settings"], check=True)


_DISTRIBUTIONS = {
    path.parent: tomllib.loads(path.read_text())["project"]
    for path in (ROOT / "pyproject.toml", *sorted((ROOT / "services").glob("*/pyproject.toml")))
}


def test_distributions_have_one_version_and_one_licence() -> None:
    assert len(_DISTRIBUTIONS) == 4
    licence = (ROOT / "LICENSE").read_text()
    for folder, project in _DISTRIBUTIONS.items():
        assert project["version"] == _PROJECT["project"]["version"] == conch.__version__
        assert project["requires-python"] == _PROJECT["project"]["requires-python"]
        assert "LICENSE" in project["license-files"] and (folder / "LICENSE").read_text() == licence
    extras = _PROJECT["project"]["optional-dependencies"]
    assert extras["native"] == [f"conch-native=={conch.__version__}"], "both have one interface"


def test_the_licence_names_those_of_files_that_others_have_written() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "services").rglob("*.LICENSE.txt")}
    (pattern,) = (each for each in _PROJECT["project"]["license-files"] if each != "LICENSE")
    assert found == {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)} != set()
    assert _PROJECT["project"]["license"] == "Apache-2.0 AND MIT"


def test_install_lines_say_where_pip_finds_conch() -> None:
    """In all pages; only the page on installs has the short form, of error texts."""
    lines = [each for each in install_lines() if each.is_ours]
    assert len(lines) > 20
    short = [each for each in lines if not {"--find-links", "-e"}.intersection(each.arguments)]
    assert [place.partition(":")[0] for each in short for place in each.places] == ["docs/install.md"]
    extras = _PROJECT["project"]["optional-dependencies"].keys()
    assert frozenset().union(*(each.extras for each in lines)) <= extras


def test_what_each_install_line_promises_is_known() -> None:
    """Or its try checks nothing."""
    for line in install_lines():
        if pip_command(line)[0] == "installed":
            assert list(promises(line)) or line.packages <= {name for name in IMPORTS if not IMPORTS[name]}
