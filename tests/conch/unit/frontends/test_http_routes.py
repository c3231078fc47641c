"""The control routes of the REST front end over a core with stand-ins for models."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.http_cases import OWN_REFUSED, REFUSED
from tests.support.core import make_spec
from tests.support.log_defaults import LOG_SETTINGS
from tests.support.raw_http import head
from tests.support.rest import Agent, Rest, Wire, door_to, make_core, pools
from tests.support.waiting import PATIENCE_S

from conch.core.errors import ConchError, FailedPreconditionError, InternalError, UnavailableError
from conch.core.model_control import IndexEntry
from conch.core.model_statistics import ModelStatistics
from conch.core.server_state import ServerState
from conch.core.spec import ModelSpec
from conch.door.local_door import LocalDoor
from conch.door.operation_handlers import Services
from conch.door.operation_table import REPOSITORY_INDEX
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.http_routing import RouteTable
from conch.frontends.http.routes.api_routes import api_routes
from conch.frontends.http.routes.api_routes import page as home_page
from conch.frontends.http.routes.operation_json import (
    cuda_registration,
    load_parameters,
    log_changes,
    system_registration,
    trace_changes,
)
from conch.memory.regions import Regions
from conch.observability.logging.log_settings import LogControl, LogOptions
from conch.observability.tracing.trace_settings import TraceSettings

MOST = 8000
NO_READY = (400, {"error": "Invalid value for 'ready': expected a boolean"})


@dataclass
class Check:
    """A model's look at itself."""

    passes: Callable[[], bool]

    def start(self) -> None:
        """Nothing has to be begun."""

    def result(self) -> bool:
        return self.passes()


@dataclass
class Stand:
    """A model as far as these routes look at one; that it has a worker means that its checks may change."""

    spec: ModelSpec
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    readiness: list[Any] = field(default_factory=list)
    workers: tuple[str, ...] = ("worker",)


@dataclass
class Site:
    """Routes over a core."""

    core: ServerState
    door: LocalDoor
    agent: Agent
    applied: list[LogOptions]
    rest: Rest


@pytest.fixture
def made() -> Iterator[Pools]:
    with pools() as made:
        yield made


@pytest.fixture
def site(made: Pools) -> Iterator[Site]:
    with site_of(made) as site:
        yield site


@contextmanager
def site_of(made: Pools, **core: Any) -> Iterator[Site]:
    agent = Agent()
    config = {"name": "m", "dims": [2**40]}
    models = [Stand(replace(make_spec(4, version=version), config=config)) for version in (1, 3)]
    models.append(Stand(make_spec(name="a")))
    built = make_core(agent, *models, **core)
    applied: list[LogOptions] = []
    services = Services(Regions(), LogControl(LogOptions(), applied.append), TraceSettings())
    with door_to(built, services) as door:
        yield Site(built, door, agent, applied, Rest(RouteTable(api_routes(door, made, MOST))))


def test_health(site: Site, made: Pools) -> None:
    assert site.rest("GET", "/v2/health/live") == (200, {"live": True})
    assert site.rest("GET", "/v2/health/ready") == (200, {"ready": True})
    for path in ("/v2/models/m/ready", "/v2/models/m/versions/1/ready"):
        assert site.rest("GET", path) == (200, {"name": "m", "ready": True}), path
    assert site.rest("GET", "/v2/models/none/ready") == (400, {"name": "none", "ready": False})
    assert site.rest("GET", "/v2/models/m/versions/2/ready") == (400, {"name": "m", "ready": False})
    assert site.rest("GET", f"/v2/models/m/versions/{10**20}/ready")[0] == 400
    with site_of(made, ready=lambda: False) as other:
        assert other.rest("GET", "/v2/health/ready") == (400, {"ready": False})


def test_the_page_for_people_links_what_there_is(site: Site) -> None:
    response = asyncio.run(site.rest.send("GET", "/"))
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = response.text
    links = re.findall('href="([^"]*)"', page)
    assert {"/v2/health/live", "/v2/health/ready", "/v2", "/openapi.json"} < set(links)
    assert {"/v2/models/m/versions/1/config", "/v2/models/a/versions/1"} < set(links)
    routes = api_routes(site.door, None)  # type: ignore[arg-type]
    for link in links:
        assert link.startswith("https://") or any(each.pattern.fullmatch(link) for each in routes), link
    for link in links:
        if link.startswith("/docs/"):
            document = asyncio.run(site.rest.send("GET", link))
            assert (document.status_code, document.text[:2]) == (200, "# "), link
    assert sum(link.startswith("/docs/") for link in links) > 3
    for name in ("none.md", "..md", "testing", "%2e%2e"):
        assert site.rest("GET", f"/docs/{name}")[0] == 404, name
    assert not re.search("<(script|img|link|style)", page), "it loads nothing"
    assert home_page("<s>", "1", [("<b>", 1), ("a b", 2)]).count("<b>") == 0
    assert "/v2/models/a%20b%2Fc/versions/2" in home_page("s", "1", [("a b/c", 2)])
    assert "console" not in page
    assert '<a href="http://127.0.0.1:8004">console</a>' in home_page("s", "1", [], "http://127.0.0.1:8004")


@pytest.mark.parametrize("path", ["rollout", "rollout/promote"])
def test_malformed_json_of_own_routes_is_the_clients_fault(site: Site, path: str) -> None:
    status, body = site.rest("POST", f"/v2/repository/models/m/{path}", b"{")
    assert (status, body["error"][:39]) == (400, "failed to parse the request JSON buffer")
    assert site.rest("PUT", "/v2/repository/models/m/labels/a", b"{")[0] == 400


def test_segments_of_paths_are_decoded(site: Site) -> None:
    assert site.rest("GET", "/v2/models/%61/ready") == (200, {"name": "a", "ready": True})
    for path, name in (("a%2Fready", "a/ready"), ("x+%2B%FF", "x++\ufffd")):
        text = f"Request for unknown model: '{name}' is not found"
        assert site.rest("GET", f"/v2/models/{path}") == (404, {"error": text})
    assert site.rest("GET", "/v2/%6dodels/a/ready")[0] == 404
    assert site.rest("POST", "/v2/repository/models/m%2B1/load") == (200, None)
    assert site.agent.asked == [("load", "m+1", {})]


def test_a_wrong_method_names_those_there_are(site: Site) -> None:
    for path, allowed in (("/v2/health/live", "GET"), ("/v2/logging", "GET, POST")):
        response = asyncio.run(site.rest.send("DELETE", path))
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


def test_a_server_that_stops_is_unavailable(site: Site) -> None:
    site.core.stopping()
    for path in ("/v2/health/live", "/v2/health/ready", "/v2"):
        assert site.rest("GET", path) == (503, {"error": "Server exiting"}), path
    assert site.rest("GET", "/v2/models/m/ready") == (503, {"error": "Server not ready"})


def test_the_loop_goes_on_while_a_model_looks_whether_it_is_ready(site: Site) -> None:
    asked, go = threading.Event(), threading.Event()

    def wait() -> bool:
        asked.set()
        return go.wait(PATIENCE_S)

    model: Any = site.core.model("a")
    model.readiness.append(Check(wait))

    async def both() -> tuple[int, int]:
        slow = asyncio.ensure_future(site.rest.send("GET", "/v2/models/a/ready"))
        await asyncio.to_thread(asked.wait, 30)
        live = await site.rest.send("GET", "/v2/health/live")
        assert not slow.done()
        go.set()
        return live.status_code, (await slow).status_code

    assert asyncio.run(both()) == (200, 200)


def test_metadata(site: Site) -> None:
    status, server = site.rest("GET", "/v2")
    assert (status, server["name"], server["version"]) == (200, "triton", "1.2.3")
    assert server["extensions"][:2] == ["classification", "sequence"]
    expected = {
        "name": "m",
        "versions": ["1", "3"],
        "platform": "test",
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 16]}],
    }
    assert site.rest("GET", "/v2/models/m") == (200, expected)
    assert site.rest("GET", "/v2/models/m/versions/1") == (200, {**expected, "versions": ["1"]})
    assert site.rest("GET", "/v2/models/none") == (
        404,
        {"error": "Request for unknown model: 'none' is not found"},
    )


def test_the_config_is_the_one_that_was_printed(site: Site) -> None:
    assert site.rest("GET", "/v2/models/m/config") == (200, {"name": "m", "dims": [2**40]})
    assert site.rest("GET", "/v2/models/m/versions/9/config")[0] == 404


def test_statistics(site: Site) -> None:
    site.core.model("m", "3").statistics.record_failure(5)
    status, all_models = site.rest("GET", "/v2/models/stats")
    listed = [(each["name"], each["version"]) for each in all_models["model_stats"]]
    assert (status, listed) == (200, [("a", "1"), ("m", "1"), ("m", "3")])
    (one,) = site.rest("GET", "/v2/models/m/versions/3/stats")[1]["model_stats"]
    assert one["inference_stats"]["fail"] == {"count": 1, "ns": 5}
    assert [one[key] for key in ("response_stats", "batch_stats", "memory_usage")] == [{}, [], []]
    assert site.rest("GET", "/v2/models/none/stats") == (
        400,
        {"error": "requested model 'none' is not available"},
    )
    assert site.rest("GET", "/v2/models/m/versions/9/stats") == (
        400,
        {"error": "requested model version is not available for model 'm'"},
    )


class Noting:
    """Passes attributes of another object on, and notes the threads that read them."""

    def __init__(self, inner: object, threads: set[str]) -> None:
        self._inner, self._threads = inner, threads

    def __getattr__(self, name: str) -> Any:
        self._threads.add(threading.current_thread().name)
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/index"),
        ("GET", "/v2/models/m/config"),
        ("GET", "/v2/models/m"),
        ("GET", "/v2/models/stats"),
        ("GET", "/"),
    ],
)
def test_what_may_be_long_is_made_off_the_loop(site: Site, method: str, path: str) -> None:
    threads: set[str] = set()
    site.agent.listing = [cast(IndexEntry, Noting(IndexEntry("m"), threads))]
    for model in (site.core.model("m", "1"), site.core.model("m", "3")):
        stand = cast(Stand, model)
        stand.spec = cast(ModelSpec, Noting(stand.spec, threads))
    assert asyncio.run(site.rest.send(method, path)).status_code == 200
    assert threads and not any("loop" in name or name == "MainThread" for name in threads)


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/repository/any/index"])
def test_index(site: Site, path: str) -> None:
    site.agent.listing = [
        IndexEntry("m", "1", "READY", labels=("champion", "stable"), traffic=99.5),
        IndexEntry("n", "2", "UNAVAILABLE", "why"),
        IndexEntry("o"),
    ]
    bodies: tuple[Any, ...] = (None, {}, [], b"null", {"x": 1})
    for body in bodies:
        assert site.rest("POST", path, body) == (
            200,
            [
                {
                    "name": "m",
                    "version": "1",
                    "state": "READY",
                    "labels": ["champion", "stable"],
                    "traffic": 99.5,
                },
                {"name": "n", "version": "2", "state": "UNAVAILABLE", "reason": "why"},
                {"name": "o"},
            ],
        )
    site.rest("POST", path, {"ready": True})
    assert [ready for _, ready in site.agent.asked] == [False] * 5 + [True]
    assert site.rest("POST", path, {"ready": 1}) == NO_READY


def test_load(site: Site) -> None:
    path = "/v2/repository/models/m/load"
    encoded = base64.b64encode(bytes(range(256))).decode()
    lines = "\n".join(encoded[i : i + 76] for i in range(0, len(encoded), 76))
    whole = {"config": "{}", "file:1/a": lines}
    bodies: tuple[Any, ...] = (None, {}, [], {"parameters": {}}, {"parameters": whole})
    for body in bodies:
        assert site.rest("POST", path, body) == (200, None)
    files = {"config": "{}", "file:1/a": bytes(range(256))}
    assert site.agent.asked == [("load", "m", {})] * 4 + [("load", "m", files)]
    site.agent.error = InternalError("failed")
    assert site.rest("POST", path) == (500, {"error": "failed"})


@pytest.mark.parametrize(("path", "body", "status", "text"), REFUSED + OWN_REFUSED)
def test_what_is_refused_changes_nothing(site: Site, path: str, body: Any, status: int, text: str) -> None:
    assert site.rest("POST", path, body) == (status, {"error": text})
    assert not site.agent.asked
    assert not site.applied
    assert site.rest("GET", "/v2/trace/setting") == (200, TRACES)
    assert site.rest("GET", "/v2/systemsharedmemory/status") == (200, [])


def test_a_file_that_is_not_in_base64_is_named(site: Site) -> None:
    status, body = site.rest("POST", "/v2/repository/models/m/load", {"parameters": {"file:1/x": "a!b"}})
    assert status == 400
    assert body["error"].startswith("load parameter 'file:1/x' must be in base64: ")


def test_unload(site: Site) -> None:
    path = "/v2/repository/models/m/unload"
    for body in (
        None,
        {},
        {"parameters": {"unload_dependents": False}},
        {"parameters": {"unload_dependents": True}},
    ):
        assert site.rest("POST", path, body) == (200, None)
    assert [given for *_, given in site.agent.asked] == [False, False, False, True]


def test_labels(site: Site) -> None:
    path = "/v2/repository/models/m/labels/champion"
    for body in ({"version": 8}, {"version": "8"}):
        assert site.rest("PUT", path, body) == (200, None)
    assert site.rest("DELETE", path) == (200, None)
    assert [each[1:] for each in site.agent.asked] == [("m", "champion", 8)] * 2 + [("m", "champion", None)]
    site.agent.error = FailedPreconditionError("declared in a file")
    assert site.rest("DELETE", path) == (409, {"error": "declared in a file"})


@pytest.mark.parametrize("body", [None, {}, [], {"version": None}, {"version": ""}, {"version": True}])
def test_a_label_needs_a_version(site: Site, body: Any) -> None:
    text = 'a label needs a body with the version that it names: {"version": 8}'
    assert site.rest("PUT", "/v2/repository/models/m/labels/x", body) == (400, {"error": text})
    assert not site.agent.asked


@pytest.mark.parametrize("action", ["load", "unload"])
def test_loads_are_posted(site: Site, action: str) -> None:
    assert site.rest("GET", f"/v2/repository/models/m/{action}")[0] == 405


def test_loads_hold_up_nothing_but_loads(site: Site) -> None:
    go = threading.Event()
    site.agent.hold = lambda: go.wait(PATIENCE_S)

    async def talk() -> list[int]:
        loads = [
            asyncio.ensure_future(site.rest.send("POST", "/v2/repository/models/m/load")) for _ in range(40)
        ]
        others = [
            (await site.rest.send(method, path)).status_code
            for method, path in (
                ("POST", "/v2/systemsharedmemory/unregister"),
                ("POST", "/v2/repository/models/m/unload"),
                ("GET", "/v2/health/ready"),
            )
        ]
        assert not any(load.done() for load in loads)
        go.set()
        return others + [(await load).status_code for load in loads]

    assert asyncio.run(talk()) == [200] * 43


def test_an_index_that_hangs_holds_up_nothing_but_indexes(site: Site) -> None:
    go = threading.Event()
    site.agent.hold = lambda: go.wait(PATIENCE_S)

    async def talk() -> list[int]:
        waiting = [asyncio.ensure_future(site.rest.send("POST", "/v2/repository/index")) for _ in range(4)]
        others = [
            (await site.rest.send("POST", path)).status_code
            for path in ("/v2/systemsharedmemory/unregister", "/v2/repository/models/m/unload")
        ]
        assert not any(index.done() for index in waiting)
        go.set()
        return others + [(await index).status_code for index in waiting]

    assert asyncio.run(talk()) == [200] * 6


def test_what_waits_when_the_pools_are_closed_is_answered(site: Site) -> None:
    go = threading.Event()
    site.agent.hold = lambda: go.wait(PATIENCE_S)

    async def talk() -> list[int]:
        loads = [
            asyncio.ensure_future(site.rest.send("POST", "/v2/repository/models/m/load")) for _ in range(40)
        ]
        while len(site.agent.asked) < 32:
            await asyncio.sleep(0)
        assert not site.door.close(lambda: 0.0)
        late = await site.rest.send("POST", "/v2/repository/models/m/load")
        go.set()
        return sorted([late.status_code, *[(await load).status_code for load in loads]])

    assert asyncio.run(talk()) == [200] * 32 + [503] * 9


def test_a_body_may_be_so_large_and_no_larger(site: Site) -> None:
    path = "/v2/repository/index"
    assert site.rest("POST", path, b" " * (MOST - 2) + b"{}")[0] == 200
    text = (
        f"request JSON size of {MOST + 1} bytes exceeds the maximum allowed input size of {MOST} bytes. Use "
        "--http-max-input-size to increase the limit."
    )
    assert site.rest("POST", path, b" " * (MOST - 1) + b"{}") == (400, {"error": text})


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/repository/models/m/load", 503, "not allowed here"),
        ("/v2/repository/models/m/unload", 503, "not allowed here"),
        ("/v2/systemsharedmemory/region/r/register", 501, "Client shared memory is disabled."),
        ("/v2/cudasharedmemory/region/r/register", 501, "Client shared memory is disabled."),
        ("/v2/models/nothing/trace/setting", 404, "Request for unknown model"),
    ],
)
def test_what_is_switched_off_is_refused_before_its_body_is_read(
    made: Pools, path: str, status: int, text: str
) -> None:
    def refuse() -> None:
        raise UnavailableError("not allowed here")

    services = Services(Regions(allowed=False), LogControl(LogOptions(), None), TraceSettings(), refuse)
    with door_to(make_core(Agent()), services) as door:
        routes = RouteTable(api_routes(door, made))

        async def answer() -> bytes:
            wire = Wire(routes)
            wire.send(head("POST", path, "Content-Length: 9999", "Expect: 100-continue"))
            await wire.ended()
            return b"".join(wire.written)

        answered = asyncio.run(answer())
    assert answered.startswith(b"HTTP/1.1 %d " % status), "the body is not asked for"
    assert text.encode() in answered


def test_settings_take_kilobytes(made: Pools) -> None:
    with door_to(make_core(Agent())) as door:
        rest = Rest(RouteTable(api_routes(door, made)))
        for path in (
            "/v2/repository/index",
            "/v2/repository/models/m/unload",
            "/v2/logging",
            "/v2/trace/setting",
            "/v2/systemsharedmemory/region/r/register",
            "/v2/cudasharedmemory/region/r/register",
        ):
            text = (
                "request JSON size of 8193 bytes exceeds the maximum allowed input size of 8192 bytes. This "
            )
            text += "path takes no more."
            assert rest("POST", path, b" " * 8191 + b"{}") == (400, {"error": text}), path
            assert "8192" not in str(rest("POST", path, b" " * 8190 + b"{}")), path
        assert rest("POST", "/v2/repository/models/m/load", b" " * 20000 + b"{}") == (200, None)


def test_deep_bodies_do_no_harm(site: Site) -> None:
    body = b"[" * 1000 + b"]" * 1000
    assert site.rest("POST", "/v2/repository/index", b'{"x":' + body + b"}") == (200, [])
    assert site.rest("POST", "/v2/repository/index", b'{"ready":' + body + b"}") == NO_READY
    for opening in (b"[", b'{"a":'):
        status, said = site.rest("POST", "/v2/repository/index", b'{"x":' + opening * 1100)
        assert (status, said) == (400, {"error": "JSON nesting depth exceeds maximum allowed limit (100)"})


def test_system_regions(site: Site) -> None:
    assert site.rest("GET", "/v2/systemsharedmemory/status") == (200, [])
    assert site.rest("GET", "/v2/systemsharedmemory/region/x/status") == (
        404,
        {"error": "Unable to find system shared memory region: 'x'"},
    )
    for unregister in ("/v2/systemsharedmemory/unregister", "/v2/systemsharedmemory/region/x/unregister"):
        assert site.rest("POST", unregister, b"whatever") == (200, None)


def test_cuda_regions(site: Site) -> None:
    assert site.rest("GET", "/v2/cudasharedmemory/status") == (200, [])
    assert site.rest("GET", "/v2/cudasharedmemory/region/x/status") == (
        404,
        {"error": "Unable to find cuda shared memory region: 'x'"},
    )
    handle = base64.b64encode(bytes(64)).decode()
    body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 8}
    assert site.rest("POST", "/v2/cudasharedmemory/register", body) == (
        400,
        {"error": "'region name' is necessary to register cuda shared memory region"},
    )
    assert site.rest("POST", "/v2/cudasharedmemory/region/r/register", body)[0] == 400
    for unregister in ("/v2/cudasharedmemory/unregister", "/v2/cudasharedmemory/region/x/unregister"):
        assert site.rest("POST", unregister) == (200, None)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
MEMBERS = st.sampled_from(
    [
        "parameters",
        "config",
        "file:1/a",
        "key",
        "offset",
        "byte_size",
        "raw_handle",
        "b64",
        "trace_level",
        "x",
    ]
)
INNER = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(MEMBERS, LEAVES, max_size=4)
ANY = INNER | st.lists(INNER, max_size=3) | st.dictionaries(MEMBERS, INNER, max_size=6)


@given(ANY)
def test_no_body_is_worse_than_an_error_of_ours(body: Any) -> None:
    for read in (load_parameters, system_registration, cuda_registration, log_changes, trace_changes):
        try:
            read(body)
        except ConchError:
            pass


def test_an_error_of_the_agent_keeps_its_status(site: Site) -> None:
    site.agent.error = UnavailableError("not now")
    assert site.rest("POST", "/v2/repository/models/m/unload") == (503, {"error": "not now"})


def test_log_settings(site: Site) -> None:
    assert site.rest("GET", "/v2/logging") == (200, LOG_SETTINGS)
    bodies: tuple[Any, ...] = (None, {}, [], {"foo": 1}, {"log_info": None, "log_file": None})
    for body in bodies:
        assert site.rest("POST", "/v2/logging", body) == (200, LOG_SETTINGS)
    assert site.applied == []
    changes = {"log_verbose_level": 2, "log_format": "ISO8601", "log_warning": False}
    assert site.rest("POST", "/v2/logging", changes) == (200, {**LOG_SETTINGS, **changes})
    assert site.rest("GET", "/v2/logging") == (200, {**LOG_SETTINGS, **changes})
    assert [options.verbose for options in site.applied] == [2]


TRACES = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


@pytest.mark.parametrize("path", ["/v2/trace/setting", "/v2/models/m/trace/setting"])
def test_trace_settings(site: Site, path: str) -> None:
    assert site.rest("GET", path) == (200, TRACES)
    bodies: tuple[Any, ...] = (None, {}, [], {"foo": 1}, {"trace_level": ["OFF"]}, {"trace_rate": None})
    for body in bodies:
        assert site.rest("POST", path, body) == (200, TRACES)
    assert site.rest("POST", path, {"trace_rate": "7"}) == (200, {**TRACES, "trace_rate": "7"})
    assert site.rest("GET", "/v2/models/a/trace/setting")[1]["trace_rate"] == (
        "7" if path == "/v2/trace/setting" else "1000"
    )


def test_trace_settings_of_an_unknown_model(site: Site) -> None:
    expected = (404, {"error": "Request for unknown model : none"})
    assert site.rest("GET", "/v2/models/none/trace/setting") == expected
    assert site.rest("GET", "/v2/models/m/versions/1/trace/setting")[0] == 404


def test_what_hangs_holds_up_the_end_of_the_pools_only_for_so_long() -> None:
    go, begun = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        go.wait(PATIENCE_S)
        return False

    with door_to(make_core(Agent())) as door:
        future = door.ask(REPOSITORY_INDEX, hang, list)
        begun.wait(PATIENCE_S)
        assert not door.close(lambda: 0.0)
        assert not future.done()
        go.set()
        assert door.close(lambda: PATIENCE_S)


def test_a_front_end_that_stops_counts_what_it_refuses_to_generate() -> None:
    with pools() as made, door_to(make_core(Agent())) as door:
        admission = door.admission("http")
        rest = Rest(RouteTable(api_routes(door, made, MOST, admission=admission)))
        admission.close()
        for number, path in enumerate(("generate", "generate_stream"), 1):
            answer = asyncio.run(rest.send("POST", f"/v2/models/m/{path}", b"{}"))
            assert (answer.status_code, answer.json()) == (503, {"error": "Server exiting"})
            assert answer.headers["connection"] == "close"
            assert admission.refused == number
