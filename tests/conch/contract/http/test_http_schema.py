"""Requests made up from the OpenAPI document, fitting and not: a client's fault is never the server's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from tests.support.profiles import scaled
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, AnyServer, write_probe

from conch.frontends.http.openapi import document

pytestmark = pytest.mark.slow

load_all_checks()
CHECKED = CHECKS.get_by_names(
    ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)
SCHEMA = schemathesis.openapi.from_dict(document("0"))
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations() if isinstance(each, Ok)}
ALLOWED = (
    # 500: what Triton says of JSON that does not fit, and of models that it does not find
    "attempt to access JSON non-",
    "log settings belong to the program",
    "attempt to access non-existing object member",
    "attempt to get members for non-object",
    "failed to get request params.: ",
    "failed to parse the request JSON buffer: ",
    "Unable to parse '",
    "Unable to parse JSON bytes array: ",
    "Failed to parse 'data' field",
    "Expected JSON object for keyword: 'parameters'",
    "Unable to open shared memory region: ",
    "unexpected error on creating Triton parameter",
    "failed to load '",
    "Request for unknown model: 'probe' version 1 is not at ready state",  # while another request unloads it
    # 501 and 503: what is not done, or not by this server
    "'repository_name' specification is not supported",
    "Unsupported c",
    "log file location can not be updated",
    "trace file location can not be updated",
    "invalid argument for --log_format, got: ",
)
"""Beginnings of the errors that come with a status of 5xx although the client is at fault."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    write_probe(repository)
    return repository


site = server_fixture(flags=["--model-control-mode=explicit", "--load-model=probe"])
"""A server with one model."""


def attack(site: AnyServer, label: str, examples: int) -> None:
    """Sends requests to one operation, half of them as the document has them."""
    operation = OPERATIONS[label]
    for mode in GenerationMode:

        @settings(
            max_examples=scaled(examples),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if "model" in case.path_parameters and len(str(case.path_parameters["model"])) % 4:
                case.path_parameters["model"] = "probe"
            with requests.Session() as session:
                try:
                    response = case.call(
                        base_url=f"http://{site.http_address}", session=session, timeout=WAIT_S
                    )
                except requests.exceptions.InvalidHeader:
                    return  # which the client itself does not send
                check(case, response)

        try:
            send()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, label  # there is nothing that could be wrong


def check(case: Any, response: Any) -> None:
    if response.status_code >= 500:
        error = response.json()["error"]
        inner = error.removeprefix("Converting keyword: 'parameters': ")
        assert inner.startswith(ALLOWED), error
    if response.status_code not in (404, 405):
        case.validate_response(response, checks=CHECKED)


FEW = [label for label in OPERATIONS if "/versions/" not in label and "{repository}" not in label]


@pytest.mark.parametrize("label", FEW)
def test_a_few_requests(site: AnyServer, label: str) -> None:
    attack(site, label, 2)
    assert requests.get(f"http://{site.http_address}/v2/health/live", timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize("label", OPERATIONS)
def test_many_requests(site: AnyServer, label: str) -> None:
    attack(site, label, 50)
    assert requests.get(f"http://{site.http_address}/v2/health/live", timeout=WAIT_S).status_code == 200
