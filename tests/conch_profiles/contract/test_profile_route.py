"""Profiles of a server's inputs: drift over HTTP, in metrics and to the console; and what is not profiled."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.console import Page
from tests.support.metrics import scrape
from tests.support.servers import LocalServer, eventually, free_port, serving, write_model

pytest.importorskip("datasketches", reason="it has no wheels for Python 3.14")

from conch_tools.profile_command import DONE, USAGE, run

CONFIG = """
backend: "identity" max_batch_size: 1000
input { name: "INPUT0" data_type: TYPE_FP64 dims: [ 1 ] }
input { name: "INPUT1" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP64 dims: [ 1 ] }
output { name: "OUTPUT1" data_type: TYPE_STRING dims: [ 1 ] }
"""
SWITCH = 'parameters { key: "CONCH_PROFILE" value { string_value: "%s" } }\n'
FLAGS = ("--profile-inputs", "--model-control-mode=explicit", "--load-model=*")
NULLS = "conch_profile_null_ratio"
ROWS = 2000


def rows(mean: float, texts: str, seed: int) -> list[tuple[float, str]]:
    chance = random.Random(seed)
    return [(chance.gauss(mean, 1), chance.choice(texts)) for _ in range(ROWS)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("profiles")
    train = root / "train.csv"
    with train.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["INPUT0", "INPUT1"])
        writer.writerows(rows(0, "aab", 1))
    models = root / "models"
    for name, parameters in {"m": "", "plain": "", "off": SWITCH % "false"}.items():
        write_model(models, name, CONFIG + parameters)
    assert run([str(train), "-o", str(models / "m" / "1")]) == DONE
    write_model(models, "matrix", CONFIG.replace("dims: [ 1 ]", "dims: [ 2 ]"))
    return models


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[LocalServer]:
    with serving(repository, flags=(*FLAGS, f"--console-port={free_port()}")) as server:
        yield server


def url(server: LocalServer, path: str) -> str:
    return f"http://{server.http_address}/v2/{path}"


def profile(server: LocalServer, model: str = "m", version: str = "") -> dict[str, Any]:
    answer = httpx.get(url(server, f"models/{model}{version}/profile"))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def send(server: LocalServer, model: str, sent: list[tuple[float, str]]) -> None:
    """Sends rows until 500 are counted."""
    body = {"dataframe_split": {"columns": ["INPUT0", "INPUT1"], "data": sent}}

    def counted() -> bool:
        answer = httpx.post(url(server, f"models/{model}/invocations"), json=body)
        assert answer.status_code == 200, answer.text
        rows: int = profile(server, model)["rows"]
        return rows >= 500

    eventually(counted, "the rows are counted")


def reload(server: LocalServer, model: str) -> None:
    assert httpx.post(url(server, f"repository/models/{model}/unload"), json={}).status_code == 200
    eventually(
        lambda: httpx.post(url(server, f"repository/models/{model}/load"), json={}).status_code == 200,
        "it is loaded",
    )


def test_drift_is_shown_and_a_reload_begins_anew(server: LocalServer) -> None:
    reload(server, "m")
    begun = profile(server)
    assert (begun["version"], begun["rows"], begun["training"]) == ("1", 0, {"rows": ROWS})
    send(server, "m", rows(0, "aab", 2))
    number, category = profile(server)["columns"]
    assert number["psi"] < 0.1 and category["psi"] < 0.1 and category["new"] == 0
    reload(server, "m")
    assert profile(server)["rows"] == 0
    send(server, "m", rows(2, "bc", 3))
    number, category = profile(server, version="/versions/1")["columns"]
    assert number["psi"] > 1 and category["psi"] > 0.5 and category["new_values"] == ["c"]
    assert 0.4 < category["new"] < 0.6
    scraped = ((name, dict(labels), value) for (name, labels), value in scrape(server.metrics_url).items())
    found = {(name, of.get("column")): value for name, of, value in scraped if of.get("model") == "m"}
    assert found["conch_profile_psi", "INPUT0"] == pytest.approx(number["psi"], rel=0.5)
    assert 0.4 < found["conch_profile_new_ratio", "INPUT1"] < 0.6
    assert found["conch_profile_null_ratio", "INPUT1"] == 0
    assert found["conch_profile_rows_total", None] >= 500
    with Page(server.console_url) as page:
        (shown,) = page.get("/api/models/m/profiles").json()["profiles"]
        assert shown["version"] == 1 and shown["columns"][0]["psi"] > 1
        assert page.get("/api/models/off/profiles").json() == {"profiles": []}


def test_a_model_without_a_training_set_has_sketches_only(server: LocalServer, repository: Path) -> None:
    send(server, "plain", rows(5, "xyz", 4))
    found = profile(server, "plain")
    number, category = found["columns"]
    assert found["training"] is None and (number["psi"], category["psi"]) == (None, None)
    assert number["quantiles"]["0.5"] == pytest.approx(5, abs=0.3)
    assert {each["value"] for each in category["top"]} == set("xyz")
    (repository / "plain" / "config.pbtxt").write_text(CONFIG + "instance_group { count: 2 }")
    assert httpx.post(url(server, "repository/models/plain/load"), json={}).status_code == 200
    assert profile(server, "plain")["rows"] >= found["rows"]  # other instances of the same version


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [("off", 404, "are not profiled"), ("matrix", 404, "are not profiled"), ("none", 404, "none")],
)
def test_other_models_have_no_profile(server: LocalServer, model: str, status: int, text: str) -> None:
    answer = httpx.get(url(server, f"models/{model}/profile"))
    assert answer.status_code == status and text in answer.json()["error"], answer.text


def test_nothing_is_profiled_by_default_but_what_a_config_asks_for(tmp_path: Path) -> None:
    for name, switch in {"m": "", "on": "true", "bad": "yes"}.items():
        write_model(tmp_path, name, CONFIG + (SWITCH % switch if switch else ""))
    write_model(tmp_path, "matrix", CONFIG.replace("dims: [ 1 ]", "dims: [ 2 ]") + SWITCH % "true")
    write_model(tmp_path, "torn", CONFIG + SWITCH % "true", {"profile.json": '{"format": 1, "rows": -1}'})
    with serving(tmp_path, flags=("--exit-on-error=false",)) as server:
        assert httpx.get(url(server, "models/m/profile")).status_code == 404
        found = profile(server, "on")
        assert (found["requests"], found["training_note"]) == (
            0,
            "no profile.json in the version's directory",
        )
        assert "'columns', an object" in profile(server, "torn")["training_note"]
        index = {each["name"]: each for each in httpx.post(url(server, "repository/index"), json={}).json()}
        assert "must be 'true' or 'false'" in index["bad"]["reason"]
        assert "no input is a column" in index["matrix"]["reason"]


def test_columns_with_long_names_are_told_apart_in_metrics(tmp_path: Path) -> None:
    names = ["c" * 100 + "1", "c" * 100 + "2"]
    one = "".join(CONFIG.splitlines(keepends=True)[i] for i in (1, 2, 4)).replace("[ 1 ]", "[ 2 ]")
    stated = json.dumps(json.dumps(names))
    write_model(
        tmp_path, "m", f'{one}parameters {{ key: "CONCH_COLUMNS" value {{ string_value: {stated} }} }}'
    )
    with serving(tmp_path, flags=("--profile-inputs",)) as server:
        found = [dict(labels)["column"] for name, labels in scrape(server.metrics_url) if name == NULLS]
    assert sorted(found) == names


def test_a_profile_is_for_those_who_may_read_the_model(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the-key-of-reader-1")
    (tmp_path / "other").write_text("the-key-of-other-1")
    policy = tmp_path / "policy.toml"
    policy.write_text(
        "".join(
            f'[[principal]]\nname = "{name}"\nkey_file = "{name}"\nread = ["{model}"]\n'
            for name, model in {"key": "m", "other": "off"}.items()
        )
    )
    with serving(repository, flags=(*FLAGS, f"--access-policy={policy}")) as server:

        def status(name: str) -> int:
            key = (tmp_path / name).read_text() if name else ""
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return httpx.get(url(server, "models/m/profile"), headers=headers).status_code

        assert [status(each) for each in ("", "key", "other")] == [401, 200, 403]


def test_a_training_set_is_counted_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = tmp_path / "train.jsonl"
    values: list[dict[str, Any]] = [{"n": 1, "t": "007", "b": True, "d": "2026-01-01", "list": [1]}]
    values += [{"n": None, "t": None, "b": False, "d": "x", "late": 2.5}]
    train.write_text("".join(json.dumps(each) + "\n" for each in values))
    assert run([str(train)]) == DONE
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "column 'list' is left out" in printed.err
    columns = found["columns"]
    assert found["rows"] == 2 and set(columns) == {"n", "t", "b", "d", "late"}
    assert (columns["n"]["nulls"], columns["late"]["nulls"]) == (1, 1)
    assert columns["t"]["categories"]["counts"] == {"007": 1} and "numbers" not in columns["t"]
    assert columns["b"]["categories"]["counts"] == {"true": 1, "false": 1}
    assert sum(columns["b"]["numbers"]["counts"]) == 2


def test_a_version_that_is_not_there_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").write_text("x\n1\n")
    assert run([str(tmp_path / "train.csv"), "-o", str(tmp_path / "1")]) == USAGE
    assert "is no directory" in capsys.readouterr().err and not (tmp_path / "1").exists()
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert run([str(tmp_path / "train.csv"), "-o", str(tmp_path / "m")]) == USAGE
    assert f"name one of a version: {tmp_path / 'm' / '1'}" in capsys.readouterr().err
