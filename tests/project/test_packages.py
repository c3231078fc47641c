"""The import packages of the wheel, as `pyproject.toml` names them."""

from __future__ import annotations

import tomllib
from itertools import chain

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
