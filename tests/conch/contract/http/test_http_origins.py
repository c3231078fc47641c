"""Requests that web pages of other origins may make, and those that they may not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.loading import files, write_number
from tests.support.server_fixtures import server_fixture
from tests.support.servers import AnyServer, started

from conch.frontends.http.cors import cross_origin_reason

CHANGES = (
    "/v2/repository/models/m/load",
    "/v2/repository/models/m/unload",
    "/v2/systemsharedmemory/region/r/register",
    "/v2/systemsharedmemory/unregister",
    "/v2/cudasharedmemory/unregister",
    "/v2/logging",
    "/v2/trace/setting",
)
EVIL = "http://evil.example"
APP = "https://app.example:8443"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type, x-key"}
ASK = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [0]}]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    write_number(repository, "m")
    return repository


server = server_fixture(
    flags=[
        *("--model-control-mode=explicit", "--load-model=m", "--allow-model-upload"),
        f"--http-cors-origin={APP}",
    ]
)
"""A developer's server, in mode explicit, which lets pages of one origin run models."""


@pytest.fixture
def client(server: AnyServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http_address}") as made:
        yield made


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL, "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Origin": APP},  # that flag is for running models only
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"User-Agent": "Mozilla/5.0", "Content-Type": "text/plain; charset=utf-8"},
        {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin"},
    ],
    ids=["origin", "null", "cors", "cross-site", "same-site", "form", "rebound"],
)
def test_pages_of_other_origins_change_nothing(
    client: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    answer = client.post(path, content=b"{}", headers=headers)
    assert answer.status_code == 403, answer.text
    assert answer.json()["error"].startswith("a web page of another origin may not ask for this: ")
    assert not any(name.startswith("access-control") for name in answer.headers)
    asked = client.options(path, headers={**headers, **PREFLIGHT})
    assert asked.status_code == 405
    assert not any(name.startswith("access-control") for name in asked.headers)


def test_the_model_of_a_page_is_not_loaded(client: httpx.Client) -> None:
    given = files(v1=7)
    body = {"parameters": {"config": given["config"], "file:1/model.py": ""}}
    headers = {"Origin": EVIL, "Content-Type": "text/plain"}
    load = "/v2/repository/models/new/load"
    assert client.post(load, content=json.dumps(body), headers=headers).status_code == 403
    assert [each["name"] for each in client.post("/v2/repository/index").json()] == ["m"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"User-Agent": "curl/8.5.0", "Content-Type": "application/x-www-form-urlencoded"},
        {"User-Agent": "node", "Content-Type": "text/plain;charset=UTF-8", "Sec-Fetch-Mode": "cors"},
        {"User-Agent": "Mozilla/5.0", "Content-Type": "application/json"},
        {"User-Agent": "Mozilla/5.0", "Sec-Fetch-Site": "none"},
        {"Origin": "http://{host}", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "http://{host}", "Content-Type": "text/plain"},
    ],
)
def test_programs_and_pages_of_the_server_itself(client: httpx.Client, headers: dict[str, str]) -> None:
    host = client.base_url.netloc.decode()
    given = {name: value.format(host=host) for name, value in headers.items()}
    assert client.post("/v2/logging", content=b"{}", headers=given).status_code == 200


@pytest.mark.parametrize("route", ["infer", "versions/1/infer", "generate", "generate_stream"])
def test_a_page_of_an_origin_that_is_allowed_runs_models(client: httpx.Client, route: str) -> None:
    path = f"/v2/models/m/{route}"
    body = {"IN": 0} if "generate" in route else ASK
    asked = client.options(path, headers={"Origin": APP, **PREFLIGHT})
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == APP
    assert asked.headers["access-control-allow-methods"] == "POST"
    assert asked.headers["access-control-allow-headers"] == "content-type, x-key"
    for content, good in ((body, True), ({}, False)):  # a page may read why it is refused, too
        answer = client.post(path, json=content, headers={"Origin": APP, "Sec-Fetch-Site": "cross-site"})
        assert answer.is_success is good
        assert answer.headers["access-control-allow-origin"] == APP
        assert answer.headers["vary"] == "origin"
    for origin in ({"Origin": EVIL}, {"Origin": "null"}, {}):
        assert client.options(path, headers={**origin, **PREFLIGHT}).status_code == 405
        answer = client.post(path, json=body, headers=origin)
        assert "access-control-allow-origin" not in answer.headers
    metadata = client.get("/v2/models/m", headers={"Origin": APP})
    assert "access-control-allow-origin" not in metadata.headers


@pytest.mark.process
def test_a_flag_that_is_no_origin(tmp_path: Path) -> None:
    for origin in ("app.example", "https://app.example/", "https://App.example", "null"):
        with started(f"--model-repository={tmp_path}", f"--http-cors-origin={origin}") as process:
            assert process.wait() == 1
            assert f"--http-cors-origin: '{origin}' is no origin" in process.errors


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("https://localhost", "LOCALHOST", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://10.0.0.1", "10.0.0.1", True),
        ("http://127.0.0.1:8888", "127.0.0.1:8000", False),
        ("http://localhost.evil.example", "localhost.evil.example", False),
        ("http://evil.example", "evil.example", False),  # a name that its owner points to this machine
        ("null", "null", False),
        ("", "", False),
    ],
)
def test_which_pages_are_the_servers_own(origin: str, host: str, own: bool) -> None:
    headers = {b"origin": origin.encode(), b"host": host.encode()}
    assert (cross_origin_reason(headers) == "") is own
