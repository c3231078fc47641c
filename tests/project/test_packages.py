"""The import packages of the wheel, as `pyproject.toml` names them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import chain

import pytest
from tests.support.servers import ROOT

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
    """Its log has the loggers of packages with an entry point."""
    groups = _PROJECT["project"]["entry-points"].values()
    entries = {value.partition(":")[0].partition(".")[0] for group in groups for value in group.values()}
    logging = {
        path.rpartition("/")[2]
        for path in packages()
        if any("getLogger(" in module.read_text() for module in (ROOT / path).rglob("*.py"))
    }
    assert logging - {"conch", "conch_control"} <= entries


_OPTIONS = _PROJECT["project"]["entry-points"]["conch.options"].values()


@pytest.mark.process
@pytest.mark.parametrize("entry", _OPTIONS)
def test_an_add_on_is_imported_before_the_server(entry: str) -> None:
    """As its own tests do; the server finds it by an entry point, and they must not import each other."""
    module = entry.partition(":")[0]
    subprocess.run([sys.executable, "-c", f"import {module}, conch.server_settings"], check=True)
