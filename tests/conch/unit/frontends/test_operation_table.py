"""The table of operations agrees with itself and with both front ends."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.rest import Agent, door_to, make_core, pools

from conch.access.access_guard import UNGUARDED
from conch.door import operation_table as table
from conch.door.operation_table import ENDPOINTS, Operation, RunsOn
from conch.frontends.grpc.operation_rpcs import operation_handlers
from conch.frontends.http.openapi import document
from conch.frontends.http.routes.api_routes import api_routes

OPERATIONS: list[Operation[Any, Any]] = [each for each in ENDPOINTS if isinstance(each, Operation)]


def test_every_constant_is_listed_once() -> None:
    constants = [each for each in vars(table).values() if isinstance(each, table.Endpoint)]
    assert {each.name for each in constants} == {each.name for each in ENDPOINTS}
    assert len({each.name for each in ENDPOINTS}) == len(ENDPOINTS)
    rpcs = [each.grpc_method for each in ENDPOINTS if each.rpc]
    assert len(set(rpcs)) == len(rpcs)


def test_the_access_categories_are_tritons() -> None:
    assert {
        "health",
        "metadata",
        "inference",
        "shared-memory",
        "model-config",
        "model-repository",
        "statistics",
        "trace",
        "logging",
    } == table.ACCESS_CATEGORIES


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_operations_that_mutate_are_not_got_and_only_blocking_ones_leave_the_thread(
    operation: Operation[Any, Any],
) -> None:
    assert operation.rpc or operation.paths
    assert not (operation.mutates and operation.paths) or operation.http_method != "GET"
    changes_settings = operation.access in ("trace", "logging")
    assert not operation.mutates or changes_settings or operation.runs_on is not RunsOn.CALLER


def test_grpc_handles_every_operation_with_an_rpc() -> None:
    with door_to(make_core(Agent())) as door:
        handlers = operation_handlers(door, UNGUARDED)
    assert sorted(handlers) == sorted(each.grpc_method for each in OPERATIONS if each.rpc)


def test_rest_routes_and_documents_every_path() -> None:
    with pools() as made, door_to(make_core(Agent())) as door:
        routes = api_routes(door, made)
    patterns = {route.pattern.pattern: (set(route.methods), route.category) for route in routes}
    paths = document("1")["paths"]
    for endpoint in ENDPOINTS:
        for template in endpoint.paths:
            for path in table.path_variants(template):
                operation = paths[path][endpoint.http_method.lower()]
                assert (operation["summary"], operation["tags"]) == (endpoint.summary, [endpoint.access])
            if endpoint is not table.INFER:  # which the application routes itself
                methods, category = patterns[table.path_pattern(template)]
                assert endpoint.http_method in methods and category == endpoint.access


@pytest.mark.parametrize(
    ("template", "variants", "fields"),
    [
        ("/openapi.json", ["/openapi.json"], [{}]),
        (
            "/v2/models/{model}[/versions/{version}]/ready",
            ["/v2/models/{model}/ready", "/v2/models/{model}/versions/{version}/ready"],
            [{"model": "m.1", "version": ""}, {"model": "m.1", "version": "7"}],
        ),
    ],
)
def test_templates(template: str, variants: list[str], fields: list[dict[str, str]]) -> None:
    assert table.path_variants(template) == variants
    pattern = re.compile(table.path_pattern(template))
    for variant, expected in zip(variants, fields, strict=True):
        path = variant.replace("{model}", "m.1").replace("{version}", "7")
        found = pattern.fullmatch(path)
        assert found is not None and found.groupdict("") == expected
        assert pattern.fullmatch(path.replace("ready", "read").replace("openapi.", "openapi_")) is None
