"""Each engine in turn; those whose packages are missing are skipped with the reason."""

from __future__ import annotations

import pytest
from tests.support.engines import ENGINES, missing_packages
from tests.support.engines.engine import Engine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        parameters = [
            pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.slow else [])
            for each in ENGINES
        ]
        metafunc.parametrize("engine", parameters, scope="module")


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        missing = missing_packages(engine)
        if missing:
            pytest.skip(f"needs {', '.join(missing)}")
