"""Labels in place of version numbers, over both protocols: before, while and after versions come and go."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tests.support.calling import run, write_script
from tests.support.loading import model_text, write_ensemble, write_number
from tests.support.server_fixtures import LOAD_ALL
from tests.support.servers import AnyServer, client_of, eventually, serving, tensor
from tritonclient.utils import InferenceServerException

Client = Any
"""A client of either protocol; both have the same methods."""
NOT_A_NUMBER = (
    "failed to get model version from specified version string '{0}' (details: stol), version should be an "
    "integral value > 0"
)
ALL = "version_policy { all { } }"


def write_versions(repository: Path, name: str, *versions: int, extra: str = ALL) -> None:
    """A model whose versions answer with their numbers."""
    write_number(repository, name, extra=extra, versions=versions)
    for version in versions:
        (repository / name / str(version) / "model.py").write_text(model_text(version))


class Site:
    """A server in explicit mode and its repository."""

    def __init__(self, server: AnyServer, repository: Path, client: triton.InferenceServerClient) -> None:
        self.server = server
        self.repository = repository
        self.grpc = client

    def label(self, model: str, label: str, version: int | None) -> httpx.Response:
        """Sets a label, or removes it."""
        url = f"http://{self.server.http_address}/v2/repository/models/{model}/labels/{label}"
        if version is None:
            return httpx.delete(url)
        return httpx.put(url, json={"version": version})

    def labels(self, model: str) -> dict[str, list[str]]:
        """The labels in the index, by version."""
        lines = httpx.post(f"http://{self.server.http_address}/v2/repository/index").json()
        return {
            line["version"]: line["labels"] for line in lines if line["name"] == model and "labels" in line
        }


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Iterator[Site]:
    repository = tmp_path_factory.mktemp("models")
    write_versions(repository, "m", 1, 2, 3)
    write_ensemble(repository, "around", "m")
    write_script(repository)
    with serving(repository, flags=LOAD_ALL) as server, client_of(server) as client:
        yield Site(server, repository, client)


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    yield module_site
    for labels in module_site.labels("m").values():
        for label in labels:
            assert module_site.label("m", label, None).status_code == 200
    module_site.grpc.load_model("m")


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, site: Site) -> Iterator[Client]:
    if request.param == "grpc":
        yield site.grpc
        return
    with closing(triton_http.InferenceServerClient(site.server.http_address)) as made:
        yield made


def inputs(client: Client) -> list[Any]:
    if isinstance(client, triton.InferenceServerClient):
        return [tensor("IN", np.ones(1, np.float32))]
    given = triton_http.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.ones(1, np.float32))
    return [given]


def answered(client: Client, version: str = "", model: str = "m") -> float:
    """The version that answers, which has to say so."""
    result: Any = client.infer(model, inputs(client), model_version=version)
    answer = float(result.as_numpy("OUT")[0])
    if model == "m":
        response = result.get_response()
        said = response["model_version"] if isinstance(response, dict) else response.model_version
        assert float(said) == answer
    return answer


def refusal(client: Client, version: str) -> str:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("m", inputs(client), model_version=version)
    return str(caught.value.message())


def test_a_label_is_a_version_wherever_one_may_be_given(site: Site, client: Client) -> None:
    assert site.label("m", "champion", 2).status_code == 200
    assert site.label("m", "next.one", 3).status_code == 200
    assert [answered(client, version) for version in ("champion", "next.one", "1", "")] == [2, 3, 1, 3]
    assert client.is_model_ready("m", "champion")
    as_json: dict[str, Any] = (
        {} if isinstance(client, triton_http.InferenceServerClient) else {"as_json": True}
    )
    assert client.get_model_metadata("m", "champion", **as_json)["versions"] == ["2"]
    config = client.get_model_config("m", "champion", **as_json)
    assert config.get("config", config)["name"] == "m"
    statistics = client.get_inference_statistics("m", "champion", **as_json)["model_stats"]
    assert [each["version"] for each in statistics] == ["2"]
    assert site.labels("m") == {"2": ["champion"], "3": ["next.one"]}
    generated = httpx.post(
        f"http://{site.server.http_address}/v2/models/m/versions/champion/generate", json={"IN": 1.0}
    )
    assert (generated.json()["OUT"], generated.json()["model_version"]) == (2.0, "2")


def test_models_call_versions_by_label(site: Site) -> None:
    site.label("m", "champion", 2)
    code = "result = shown(call('m', 1, model_version={!r}).exec())"
    assert run(site.grpc, code.format("champion")) == "[[2.0]]"
    assert run(site.grpc, code.format("")) == "[[3.0]]"
    assert "is not ready" in run(site.grpc, code.format("other"))
    assert run(site.grpc, "result = pb_utils.is_model_ready('m', 'champion')") == "True"


def test_unknown_labels_have_tritons_texts(site: Site, client: Client) -> None:
    over_http = isinstance(client, triton_http.InferenceServerClient)
    assert refusal(client, "champion") == ("Not Found" if over_http else NOT_A_NUMBER.format("champion"))
    site.label("m", "champion", 2)
    known = "; the labels of the model are 'champion' (2)"
    assert refusal(client, "chapmion") == NOT_A_NUMBER.format("chapmion") + known


def test_stable_is_what_no_version_means(site: Site, client: Client) -> None:
    site.label("m", "stable", 1)
    assert [answered(client), answered(client, model="around"), answered(client, "3")] == [1, 1, 3]
    site.label("m", "stable", 2)
    assert [answered(client), answered(client, model="around")] == [2, 2]
    assert site.label("m", "stable", None).status_code == 200
    assert [answered(client), answered(client, model="around")] == [3, 3]


def test_a_label_without_its_version_fails_until_that_is_back(site: Site, client: Client) -> None:
    site.label("m", "champion", 1)
    site.label("m", "stable", 1)
    config = site.repository / "m" / "config.pbtxt"
    before = config.read_text()
    aside = site.repository.with_name("aside")
    shutil.move(site.repository / "m" / "1", aside)
    try:
        site.grpc.load_model("m")
        lost = "Request for unknown model: 'm' version 1, which label 'champion' names, is not at ready state"
        assert refusal(client, "champion") == lost
        assert (answered(client), answered(client, "2")) == (3, 2)  # in place of `stable`
        assert not client.is_model_ready("m", "champion")
    finally:
        shutil.move(aside, site.repository / "m" / "1")
    site.grpc.load_model("m")
    assert (answered(client, "champion"), answered(client), config.read_text()) == (1, 1, before)


def test_labels_outlive_an_unload(site: Site, client: Client) -> None:
    site.label("m", "champion", 2)
    site.grpc.unload_model("m", unload_dependents=False)
    eventually(lambda: not site.grpc.is_model_ready("m"), "it is unloaded")
    text = "Request for unknown model: 'm' version 2, which label 'champion' names, is not at ready state"
    assert refusal(client, "champion") == text
    site.grpc.load_model("m")
    assert answered(client, "champion") == 2
    site.grpc.load_model("around")


def test_a_label_keeps_its_version_from_the_version_policy(tmp_path: Path) -> None:
    write_versions(tmp_path, "m", 1, extra="")
    with serving(tmp_path, flags=LOAD_ALL) as server, client_of(server) as client:
        site = Site(server, tmp_path, client)
        assert site.label("m", "stable", 1).status_code == 200
        write_versions(tmp_path, "m", 1, 2, extra="")
        client.load_model("m")
        assert (answered(client), answered(client, "2")) == (1, 2)
        assert site.label("m", "stable", 2).status_code == 200
        client.load_model("m")
        assert answered(client) == 2


def test_what_is_refused(site: Site, tmp_path: Path) -> None:
    for model, label, version, status, text in (
        ("m", "1st", 1, 400, "label '1st' must begin with a letter"),
        ("m", "champion", 9, 404, "'m' version 9 is not found"),
        ("x", "champion", 1, 404, "'x' is not found"),
        ("m", "champion", None, 404, "model 'm' has no label 'champion'"),
    ):
        response = site.label(model, label, version)
        assert (response.status_code, text in response.json()["error"]) == (status, True), response.text
    write_versions(tmp_path, "m", 1)
    with serving(tmp_path) as server, client_of(server) as client:
        response = Site(server, tmp_path, client).label("m", "champion", 1)
    assert (response.status_code, "is not allowed" in response.json()["error"]) == (503, True)


def test_no_request_fails_while_labels_move_and_versions_are_swapped(site: Site, client: Client) -> None:
    site.label("m", "stable", 1)
    site.label("m", "champion", 2)
    stop = threading.Event()
    failures: list[BaseException] = []
    answers: set[float] = set()

    def ask() -> None:
        try:
            while not stop.is_set():
                answers.update((answered(client), answered(client, "champion")))
        except BaseException as failure:
            failures.append(failure)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for turn in range(12):
            site.label("m", "stable", turn % 3 + 1)
            site.label("m", "champion", (turn + 1) % 3 + 1)
            path = site.repository / "m" / str(turn % 3 + 1) / "model.py"
            path.write_text(f"{model_text(turn % 3 + 1)}\n# {turn}\n")
            site.grpc.load_model("m")
    finally:
        stop.set()
        asking.join()
    assert (failures, answers <= {1.0, 2.0, 3.0}) == ([], True)
