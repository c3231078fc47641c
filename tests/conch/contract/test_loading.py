"""Models that come with the request to load them, and who may load what."""

from __future__ import annotations

import os
import random
import re
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from tests.support.cases import check
from tests.support.cases.repository_cases import (
    LOADS,
    NOT_ALLOWED,
    OWN_LOADS,
    OWN_REFUSED_PATHS,
    REFUSED_PATHS,
)
from tests.support.loading import (
    BROKEN,
    answer,
    config_json,
    files,
    index,
    load,
    model_text,
    settled,
    unload,
    write_number,
)
from tests.support.servers import WAIT_S, AnyServer, RawClient, client_of, eventually, free_port, serving
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from conch.core.errors import InvalidArgumentError
from conch_control.config import json_format
from conch_control.config.lenient_json import parse_lenient
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions

EXPLICIT = "--model-control-mode=explicit"
UPLOADS = "--allow-model-upload"
UNPOLLED = ("INTERNAL", "failed to load 'm', failed to poll from model repository: ")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AnyServer, Path, Path]]:
    """A server in explicit mode, its repository, and where it makes temporary directories."""
    repository = tmp_path_factory.mktemp("models")
    temporary = tmp_path_factory.mktemp("temporary")
    write_number(repository, "m")
    with (
        patch.object(tempfile, "tempdir", str(temporary)),
        serving(repository, flags=[EXPLICIT, UPLOADS]) as server,
    ):
        with closing(RawClient(server.address)) as client:
            index(client)  # gRPC keeps what it makes for its first call
        yield server, repository, temporary


@pytest.fixture
def raw(site: tuple[AnyServer, Path, Path]) -> Iterator[RawClient]:
    """A client of that server; leaves nothing loaded, and so no file behind."""
    with closing(RawClient(site[0].address)) as client:
        yield client
        for name in ("m", "new"):
            assert unload(client, name) == {}
        assert settled(client)[0][:3] in (("m", "", ""), ("m", "1", "UNAVAILABLE"))
        eventually(lambda: not os.listdir(site[2]), "the files are removed")


def test_files_over_the_client_library(site: tuple[AnyServer, Path, Path], raw: RawClient) -> None:
    temporary = site[2]
    with client_of(site[0]) as client:
        contents = {"file:3/model.py": model_text(3).encode(), "file:3/more/data.bin": bytes(range(256))}
        client.load_model("m", config=config_json(), files=contents)
        assert answer(raw, "m") == 3.0
        assert [line[:3] for line in index(raw)] == [("m", "3", "READY")]
        (folder,) = temporary.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "3" / "more" / "data.bin").read_bytes() == bytes(range(256))
        client.load_model("m")
        assert answer(raw, "m") == 1.0
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model("m", files=contents)
        assert answer(raw, "m") == 1.0


def test_a_model_that_no_repository_has(raw: RawClient) -> None:
    assert load(raw, "new", files(v2=2)) == {}
    assert answer(raw, "new") == 2.0
    assert {line[0] for line in index(raw)} == {"m"}
    text = "failed to load 'new', failed to poll from model repository"
    assert load(raw, "new") == ("INTERNAL", text)
    assert answer(raw, "new") == 2.0
    assert load(raw, "new", files(v2=4)) == {}
    assert answer(raw, "new") == 4.0
    unload(raw, "new")
    assert answer(raw, "new") == ("NOT_FOUND", "Request for unknown model: 'new' has no available versions")


def test_files_that_fail_leave_what_serves(raw: RawClient) -> None:
    assert load(raw, "m", files(v1=5)) == {}
    code, text = load(raw, "m", files(v1=BROKEN))
    assert code == "INVALID_ARGUMENT"
    assert text.startswith(
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ValueError: told to"
    )
    assert answer(raw, "m") == 5.0
    code, text = load(raw, "m", {**files(v1=5), "config": "{"})
    assert (code, text[: len(UNPOLLED[1])]) == UNPOLLED
    assert answer(raw, "m") == 5.0


@pytest.mark.parametrize("path", REFUSED_PATHS + OWN_REFUSED_PATHS)
def test_paths_that_are_refused(site: tuple[AnyServer, Path, Path], raw: RawClient, path: str) -> None:
    around = sorted(os.listdir(site[2].parent))
    code, text = load(raw, "m", {**files(v1=2), f"file:{path}": b"evil"})
    assert (code, text[: len(UNPOLLED[1])]) == UNPOLLED
    assert os.listdir(site[2]) == []
    assert sorted(os.listdir(site[2].parent)) == around
    assert answer(raw, "m")[0] == "NOT_FOUND"


def test_a_path_that_begins_with_a_slash_stays_inside(
    site: tuple[AnyServer, Path, Path], raw: RawClient, tmp_path: Path
) -> None:
    assert load(raw, "m", {**files(v1=2), f"file:{tmp_path}/evil": b"evil"}) == {}
    assert os.listdir(tmp_path) == []
    (folder,) = site[2].iterdir()
    assert (folder / str(tmp_path / "evil").lstrip("/")).read_bytes() == b"evil"


@pytest.mark.parametrize("escape", ["{path}", "../../../{path}"], ids=["absolute", "escaping"])
def test_configs_name_no_files_outside_the_model(
    site: tuple[AnyServer, Path, Path], raw: RawClient, tmp_path: Path, escape: str
) -> None:
    server, repository, _ = site
    outside = tmp_path / "model.py"
    name = escape.format(path=outside)

    def refusals() -> list[str]:
        config = config_json(default_model_filename=name)
        (repository / "m" / "config.pbtxt").write_text(f'{written}default_model_filename: "{name}"\n')
        url = f"http://{server.http_address}/v2/repository/models/m/load"
        return [
            load(raw, "m", {"config": config})[1],
            httpx.post(url, json={"parameters": {"config": config}}).json()["error"],
            load(raw, "m")[1],
        ]

    written = (repository / "m" / "config.pbtxt").read_text()
    try:
        missing = refusals()
        outside.write_text(model_text(7))
        assert refusals() == missing  # no text tells whether there is such a file
    finally:
        (repository / "m" / "config.pbtxt").write_text(written)
    assert len(set(missing)) == 1
    assert f"default_model_filename '{name}' must stay within the directory of model 'm'" in missing[0]


def test_hostile_parameters_harm_nobody(raw: RawClient) -> None:
    chance = random.Random(4)
    assert load(raw, "new", files(v1=8)) == {}
    pieces = ("..", "/", "file:", "config", "1", "\0", ".", "é", "x" * 300, "\n", "%2e%2e", "\\", " ")
    values: tuple[Any, ...] = (b"", b"\0\xff", "{", "{}", "\0", config_json(), True, -(2**63), "[]", "null")
    for _ in range(300):
        parameters = {
            chance.choice(("", "file:", "file:1/")) + "".join(chance.choices(pieces, k=chance.randrange(4))):
            chance.choice(values)
            for _ in range(chance.randrange(1, 4))
        }  # fmt: skip
        if chance.random() < 0.7:
            parameters["config"] = chance.choice(values)
        outcome = load(raw, "m", parameters)
        assert outcome == {} or outcome[0] in ("INVALID_ARGUMENT", "INTERNAL"), outcome
        assert "could not be answered" not in str(outcome)
    assert answer(raw, "new") == 8.0
    assert load(raw, "m", files(v1=3)) == {}
    assert answer(raw, "m") == 3.0


@pytest.mark.parametrize("name", LOADS | OWN_LOADS)
def test_loads_that_do_nothing(raw: RawClient, name: str) -> None:
    check(raw, (LOADS | OWN_LOADS)[name])
    assert {line[0] for line in index(raw)} == {"m"}


def test_names_of_models_with_files(raw: RawClient) -> None:
    for name in ("", " ", "..", " ../", "a/b"):
        assert load(raw, name, files(v1=1))[0] == "INVALID_ARGUMENT", name
    assert load(raw, "a\0b", files(v1=1))[0] == "INTERNAL"
    for name in (".", "...", "x" * 1000, "é b"):
        assert load(raw, name, files(v1=1)) == {}, name[:9]
        assert answer(raw, name) == 1.0
        assert unload(raw, name) == {}
    settled(raw)


def test_the_end_of_the_server_removes_the_files(tmp_path: Path) -> None:
    repository, temporary = tmp_path / "models", tmp_path / "temporary"
    repository.mkdir()
    temporary.mkdir()
    with (
        patch.object(tempfile, "tempdir", str(temporary)),
        serving(repository, flags=[EXPLICIT, UPLOADS]) as server,
    ):
        with closing(RawClient(server.address)) as client:
            assert load(client, "m", files(v1=1)) == {}
        assert len(os.listdir(temporary)) == 1
    assert os.listdir(temporary) == []


def test_the_operator_forbids_loading(tmp_path: Path) -> None:
    write_number(tmp_path, "m")
    write_number(tmp_path, "n")
    flags = [EXPLICIT, "--allow-model-control=false", "--load-model=m"]
    refused = (
        "UNAVAILABLE",
        "model load / unload is not allowed on this port: the server runs with --allow-model-control=false",
    )
    with serving(tmp_path, flags=flags) as server, closing(RawClient(server.address)) as client:
        assert load(client, "n") == refused
        assert load(client, "n", files(v1=2)) == refused
        assert load(client, "") == refused
        assert load(client, "n", {"x": 1}) == ("INVALID_ARGUMENT", "unrecognized load parameter 'x'.")
        request = service_pb2.RepositoryModelUnloadRequest(model_name="m")
        with pytest.raises(Exception, match="not allowed on this port"):
            client("RepositoryModelUnload", request)
        assert [line[:3] for line in index(client)] == [("m", "1", "READY"), ("n", "", "")]
        assert answer(client, "m") == 1.0


def test_the_mode_forbids_loading(tmp_path: Path) -> None:
    write_number(tmp_path, "m")
    refused = ("UNAVAILABLE", NOT_ALLOWED)
    with serving(tmp_path) as server, closing(RawClient(server.address)) as client:
        assert load(client, "m") == refused
        assert load(client, "m", files(v1=2)) == refused
        assert load(client, "..") == refused
        assert load(client, "m", {"x": 1}) == ("INVALID_ARGUMENT", "unrecognized load parameter 'x'.")


def test_configs_of_any_size_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By all ports, before anything is parsed, and in files too; what is served stays."""
    write_number(tmp_path, "m")
    write_number(tmp_path, "large", extra=f"# {'x' * 5000}")
    target = f"127.0.0.1:{free_port()}"
    flags = ["--load-model=m", "--max-model-config-size=4096", f"--control-port={target[10:]}"]
    config = "{" * 5000
    too_large = "a model's config of 5000 bytes is too large: --max-model-config-size allows 4096"
    refusal = f"Load parameter 'config': {too_large}"
    with (
        serving(tmp_path, flags=[EXPLICIT, *flags]) as server,
        closing(RawClient(server.address)) as client,
        closing(ModelControlClient(ConnectionOptions(target), WAIT_S)) as operator,
    ):
        assert load(client, "m", {"config": config}) == ("INVALID_ARGUMENT", refusal)
        assert load(client, "m", {**files(v1=2), "config": config}) == ("INVALID_ARGUMENT", refusal)
        body = {"parameters": {"config": config}}
        response = httpx.post(f"http://{server.http_address}/v2/repository/models/m/load", json=body)
        assert (response.status_code, response.json()["error"]) == (400, refusal)
        with pytest.raises(InvalidArgumentError, match=refusal):
            operator.load("m", {"config": config})
        code, text = load(client, "large")
        assert (code, text.replace("'large'", "'m'", 1)[: len(UNPOLLED[1])]) == UNPOLLED
        assert re.search(r"large/config.pbtxt: a model's config of 5\d{3} bytes is too large", caplog.text)
        assert answer(client, "m") == 1.0


def test_a_config_is_parsed_once_and_on_no_serving_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def counted(text: str) -> Any:
        threads.append(threading.current_thread().name)
        return parse_lenient(text)

    monkeypatch.setattr(json_format, "parse_lenient", counted)
    write_number(tmp_path, "m")
    with serving(tmp_path, flags=[EXPLICIT, UPLOADS]) as server, closing(RawClient(server.address)) as client:
        for number in (2, 3):
            assert load(client, "m", files(v1=number)) == {}
            assert answer(client, "m") == number
        unload(client, "m")
    assert len(threads) == 2
    assert not any(re.fullmatch(r"conch-(http|grpc-\d+|grpc-watch)", name) for name in threads)
