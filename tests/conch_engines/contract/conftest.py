"""Each engine or format in turn; those whose packages are missing are skipped with the reason."""

from __future__ import annotations

import pytest
from tests.support.contract_server import client, placement, raw, server, servers, signal_files
from tests.support.engines import ENGINES, FORMATS, missing_packages
from tests.support.engines.engine import Engine
from tests.support.warm_grpc import grpc_is_warm

__all__ = ["client", "grpc_is_warm", "placement", "raw", "server", "servers", "signal_files"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, all_of in (("engine", ENGINES), ("file_format", FORMATS)):
        if name in metafunc.fixturenames:
            parameters = [
                pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.slow else [])
                for each in all_of
            ]
            metafunc.parametrize(name, parameters, scope="module")


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    for name in {"engine", "file_format"} & set(request.fixturenames):
        engine: Engine = request.getfixturevalue(name)
        missing = missing_packages(engine)
        if missing:
            pytest.skip(f"needs {', '.join(missing)}")
