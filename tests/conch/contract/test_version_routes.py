"""Routed models over both protocols: who gets which version, and that a request sees one side throughout."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.calling import run, write_script
from tests.support.loading import model_text, write_ensemble, write_number
from tests.support.servers import WAIT_S, eventually, tensor

from conch.core.model_control import IndexEntry
from conch.core.registry import Registry
from conch.core.route import WHOLE, Attribute, MatchRule, Route, route_salt
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.http.http_options import HttpOptions
from conch.server import InferenceServer
from conch.server_options import PartOptions
from conch_control.control_options import ControlOptions

SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 }"
ALL = "version_policy { all { } }"
HALF = Route(1, 2, ((2, WHOLE // 2),), route_salt("g", "1"), (Attribute("header", "x-user-id"),))
CALLS = "result = [shown(call(name, 1).exec()) for name in ('m', 'twin', 'outer', 'm')]"
USERS = [f"user-{number}" for number in range(24)]


class Site(NamedTuple):
    """A server's address, registry, index and a client."""

    http: str
    registry: Registry
    ready: Callable[[], list[IndexEntry]]
    grpc: triton.InferenceServerClient

    def by_grpc(self, headers: Mapping[str, str] | None = None, model: str = "m", **more: Any) -> float:
        """The version that answers over gRPC."""
        inputs = [tensor("IN", np.ones(1, np.float32))]
        return float(self.grpc.infer(model, inputs, headers=headers, **more).as_numpy("OUT")[0])

    def by_http(self, headers: Mapping[str, str] | None = None, model: str = "m", version: str = "") -> float:
        """The version that answers over HTTP."""
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        return float(self._post(model, "infer", version, headers, json=body)["outputs"][0]["data"][0])

    def by_raw(self, headers: Mapping[str, str] | None = None, model: str = "m") -> float:
        """The version that answers to a raw binary body, which JSON describes with its length 0."""
        given = {"inference-header-content-length": "0", **(headers or {})}
        url = f"http://{self.http}/v2/models/{model}/infer"
        response = httpx.post(url, headers=given, content=np.ones(1, np.float32).tobytes())
        assert response.status_code == 200, response.text
        return float(np.frombuffer(response.content[-4:], np.float32)[0])

    def by_generate(self, headers: Mapping[str, str] | None = None, model: str = "m") -> float:
        """The version that answers to flat JSON."""
        return float(self._post(model, "generate", "", headers, json={"IN": 1.0})["OUT"])

    def by_stream(self, headers: Mapping[str, str] | None = None, model: str = "m") -> float:
        """The version that answers on a stream."""
        answers: list[Any] = []
        came = threading.Event()

        def take(result: Any, error: Any) -> None:
            answers.append(error or result)
            came.set()

        self.grpc.start_stream(take, headers=headers)
        try:
            self.grpc.async_stream_infer(model, [tensor("IN", np.ones(1, np.float32))])
            assert came.wait(WAIT_S)
        finally:
            self.grpc.stop_stream()
        return float(answers[0].as_numpy("OUT")[0])

    def _post(
        self, model: str, what: str, version: str, headers: Mapping[str, str] | None, **more: Any
    ) -> dict[str, Any]:
        versions = f"/versions/{version}" if version else ""
        url = f"http://{self.http}/v2/models/{model}{versions}/{what}"
        response = httpx.post(url, headers=dict(headers or {}), **more)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


WAYS = [Site.by_grpc, Site.by_http, Site.by_raw, Site.by_generate, Site.by_stream]


@pytest.fixture(scope="module", params=["in_process", pytest.param("worker", marks=pytest.mark.process)])
def module_site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None
) -> Iterator[Site]:
    repository = tmp_path_factory.mktemp("models")
    for name, extra in (("m", ALL), ("twin", ALL), ("sequential", ALL + SEQUENCES)):
        write_number(repository, name, extra=extra, versions=(1, 2))
        for version in (1, 2):
            (repository / name / str(version) / "model.py").write_text(model_text(version))
    write_ensemble(repository, "around", "m")
    write_ensemble(repository, "outer", "around")
    write_script(repository)
    control = ControlOptions(
        repositories=(repository,), backend_options={"python": {"placement": request.param}}
    )
    options = PartOptions(
        control=control,
        grpc=GrpcOptions(address="127.0.0.1", port=0),
        http=HttpOptions(address="127.0.0.1", port=0),
    )
    server = InferenceServer(options)
    server.start()
    try:
        with closing(triton.InferenceServerClient(f"127.0.0.1:{server.port('gRPC')}")) as client:
            site = Site(
                f"127.0.0.1:{server.port('HTTP')}",
                server.core.registry,
                partial(server.agent.index, True),
                client,
            )
            # Threads and descriptors that are kept from the first request on.
            for number in "12":
                for name in ("m", "twin"):
                    site.by_grpc(model=name, model_version=number, client_timeout=WAIT_S)
                more: dict[str, Any] = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
                site.by_grpc(model="sequential", model_version=number, client_timeout=WAIT_S, **more)
            run(client, CALLS)
            for way in WAYS:
                way(site)
            yield site
    finally:
        assert server.stop()


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    yield module_site
    for name in ("m", "twin", "sequential"):
        module_site.registry.set_route(name, None)


def test_a_user_gets_one_side_over_every_way_in(site: Site) -> None:
    site.registry.set_route("m", HALF)
    sides = {user: site.by_grpc({"x-user-id": user}) for user in USERS}
    assert set(sides.values()) == {1.0, 2.0}
    for way in WAYS:
        assert {user: way(site, {"x-user-id": user}) for user in USERS} == sides, way
    site.registry.set_route("m", None)
    assert {site.by_grpc({"x-user-id": user}) for user in USERS} == {2.0}


@pytest.mark.parametrize("way", WAYS)
def test_overrides_and_match_rules(site: Site, way: Any) -> None:
    rule = MatchRule.parse("header:x-beta=1")
    site.registry.set_route("m", Route(1, 2, match=(rule,)))
    wanted = [({}, 1), ({"conch-version": "candidate"}, 2), ({"conch-version": "2"}, 2), ({"x-beta": "1"}, 2)]
    wanted.append(({"x-beta": "1", "conch-version": "stable"}, 1))
    assert [way(site, headers) for headers, _ in wanted] == [version for _, version in wanted]


def test_an_override_that_names_nothing_is_refused(site: Site) -> None:
    site.registry.set_route("m", HALF)
    site.registry.set_labels("m", {"champion": 1}, "api")
    response = httpx.post(
        f"http://{site.http}/v2/models/m/infer",
        headers={"conch-version": "chapmion"},
        json={"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]},
    )
    site.registry.set_labels("m", {}, "api")
    assert response.status_code == 400
    assert response.json()["error"] == (
        "conch-version: failed to get model version from specified version string 'chapmion' (details: "
        "stol), version should be an integral value > 0; the labels of the model are 'champion' (1)"
    )


def test_explicit_versions_and_questions_bypass_the_route(site: Site) -> None:
    site.registry.set_route("m", Route(1, 2, ((2, WHOLE),)))
    assert (site.by_grpc(model_version="1"), site.by_http(version="1"), site.by_grpc()) == (1, 1, 2)
    assert httpx.get(f"http://{site.http}/v2/models/m").json()["versions"] == ["1", "2"]
    entries = [entry for entry in site.ready() if entry.name == "m"]
    assert {entry.version: entry.traffic for entry in entries} == {"1": 0, "2": 100}


def test_what_a_request_asks_for_sees_its_side(site: Site) -> None:
    """Ensembles and calls of models, in one or several layers, and models of one group."""
    for name in ("m", "twin"):
        site.registry.set_route(name, HALF)
    sides: Counter[float] = Counter()
    for user in USERS:
        headers = {"x-user-id": user}
        side = site.by_grpc(headers)
        sides[side] += 1
        assert site.by_grpc(headers, "around") == site.by_http(headers, "outer") == side
        assert site.by_generate(headers, "outer") == side
        assert run(site.grpc, CALLS, headers=headers) == str([[[side]]] * 4)
    assert len(sides) == 2


def test_a_request_without_a_key_sees_one_side_too(site: Site) -> None:
    for name in ("m", "twin"):
        site.registry.set_route(name, HALF)
    seen = {run(site.grpc, CALLS) for _ in range(40)}
    assert seen == {str([[[side]]] * 4) for side in (1.0, 2.0)}


def test_a_sequence_ends_where_it_began(site: Site) -> None:
    def turn(sequence: int, **more: Any) -> float:
        return site.by_grpc(model="sequential", sequence_id=sequence, **more)

    site.registry.set_route("sequential", Route(1, 2))
    assert turn(7, sequence_start=True) == 1
    site.registry.set_route("sequential", Route(1, 2, ((2, WHOLE),)))
    assert (turn(7), turn(8, sequence_start=True)) == (1, 2)
    site.registry.set_route("sequential", Route(1, 2))
    assert (turn(8), turn(7, sequence_end=True), turn(8, sequence_end=True)) == (2, 1, 2)
    assert turn(8, sequence_start=True, sequence_end=True) == 1


def test_a_sequence_goes_on_where_it_is_when_stable_moves(site: Site) -> None:
    def turn(sequence: int, **more: Any) -> float:
        return site.by_grpc(model="sequential", sequence_id=sequence, **more)

    site.registry.set_labels("sequential", {"stable": 1}, "api")
    try:
        assert turn(7, sequence_start=True) == 1
        site.registry.set_labels("sequential", {"stable": 2}, "api")
        assert (turn(7), turn(8, sequence_start=True)) == (1, 2)
        assert site.by_grpc({"conch-version": "1"}, "sequential", sequence_id=8) == 2, "there is no rollout"
        assert (turn(7, sequence_end=True), turn(8, sequence_end=True)) == (1, 2)
    finally:
        site.registry.set_labels("sequential", {}, "api")


def test_no_request_fails_while_routes_change(site: Site) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    counts: Counter[float] = Counter()

    def ask(way: Any) -> None:
        try:
            while not stop.is_set():
                counts[way(site)] += 1
        except BaseException as failure:
            failures.append(failure)

    asking = [threading.Thread(target=ask, args=(way,)) for way in (Site.by_grpc, Site.by_http)]
    for thread in asking:
        thread.start()
    try:
        for share in (0, 100, 5000, WHOLE, 5000, 0):
            before = counts.total()
            site.registry.set_route("m", Route(1, 2, ((2, share),)))
            eventually(lambda: failures or counts.total() > before + 20, "requests are answered")  # noqa: B023
        site.registry.set_route("m", None)
    finally:
        stop.set()
        for thread in asking:
            thread.join()
    assert not failures
    assert set(counts) == {1.0, 2.0}
