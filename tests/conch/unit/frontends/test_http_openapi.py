"""The OpenAPI document: valid, and about the routes there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import schemathesis
from tests.support.rest import Agent, Rest, door_to, make_core, pools

from conch.frontends.http.http_routing import Route, RouteTable, route
from conch.frontends.http.openapi import document
from conch.frontends.http.routes.api_routes import api_routes

DOCUMENT = document("1.2.3")
METHODS = ("get", "post", "put", "delete")


INFER = route("/v2/models/[^/]+(?:/versions/[0-9]+)?/infer", ["POST"], "inference", lambda exchange: None)


@pytest.fixture
def routes() -> Iterator[list[Route]]:
    with pools() as made, door_to(make_core(Agent())) as door:
        yield [*api_routes(door, made), INFER]


def example(path: str) -> str:
    return re.sub(r"{(\w+)}", lambda found: "7" if found[1] == "version" else "name", path)


def test_the_document_is_valid() -> None:
    schemathesis.openapi.from_dict(json.loads(json.dumps(DOCUMENT))).validate()


def test_every_path_is_a_route_and_every_route_has_a_path(routes: list[Route]) -> None:
    unnamed = set(range(len(routes)))
    for path, item in DOCUMENT["paths"].items():
        place, found = next(
            (place, each) for place, each in enumerate(routes) if each.pattern.fullmatch(example(path))
        )
        unnamed.discard(place)
        operations = {key: value for key, value in item.items() if key in METHODS}
        assert {method.upper() for method in operations} == set(found.methods), path
        assert {tuple(operation["tags"]) for operation in operations.values()} == {(found.category,)}, path
        groups = set(re.findall(r"{(\w+)}", path))
        assert {parameter["name"] for parameter in item.get("parameters", [])} == groups, path
    assert not [routes[place].pattern.pattern for place in unnamed]


def test_optional_parts_of_a_route_are_described_with_and_without_them(routes: list[Route]) -> None:
    examples = [example(path) for path in DOCUMENT["paths"]]
    for each in routes:
        matching = [path for path in examples if each.pattern.fullmatch(path)]
        assert len(matching) >= 2 ** each.pattern.pattern.count(")?"), each.pattern.pattern


def test_the_document_is_served(routes: list[Route]) -> None:
    assert Rest(RouteTable(routes))("GET", "/openapi.json") == (200, json.loads(json.dumps(DOCUMENT)))
