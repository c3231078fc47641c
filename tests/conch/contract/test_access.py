"""An access policy on the ports of a server: every RPC and every route with every role, limits, listings."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as http_triton
from tests.support.certificates import Authority
from tests.support.servers import (
    WAIT_S,
    LocalServer,
    RawClient,
    check_simple,
    copy_example,
    eventually,
    free_port,
    probe_inputs,
    serving,
    simple_inputs,
    write_probe,
)
from tests.support.tokens import AUDIENCE, ISSUER, Issuer
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from conch.core.errors import (
    ConchError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from conch.door.operation_table import ENDPOINTS, Endpoint, path_variants
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ClientTls, ConnectionOptions
from conch_control.remote_api.port_access import ACTIONS
from conch_control.remote_api.server import MOST_WATCHES

POLICY = f"""
[jwt]
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
jwks_file = "jwks.json"

[[principal]]
name = "infers"
key_file = "keys/infers"
infer = ["simple", "probe"]

[[principal]]
name = "reads"
key_file = "keys/reads"
read = ["*"]

[[principal]]
name = "controls"
key_file = "keys/controls"
control = ["*"]

[[principal]]
name = "others"
key_file = "keys/others"
infer = ["other*"]
read = ["other*"]
control = ["other*"]

[[principal]]
name = "users"
claims = {{ sub = "alice" }}
infer = ["simple"]

[[principal]]
name = "slow"
key_file = "keys/slow"
infer = ["simple"]
requests_per_second = 0.001

[[principal]]
name = "streams"
key_file = "keys/streams"
infer = ["simple"]
requests_per_second = 0.001

[[principal]]
name = "heavy"
key_file = "keys/heavy"
infer = ["*"]
bytes_per_second = 0.001

[[principal]]
name = "chunks"
key_file = "keys/chunks"
infer = ["*"]
bytes_per_second = 0.001

[[principal]]
name = "single"
key_file = "keys/single"
infer = ["*"]
concurrent = 1
"""
NAMES = ("infers", "reads", "controls", "others", "slow", "streams", "heavy", "chunks", "single")
KEYS = {name: f"the-key-of-{name}-1" for name in NAMES}
ROLES = {"infers": "infer", "reads": "read", "controls": "control"}

# By endpoint, the roles for it; a row for each, so that one without a decision fails.
ALLOWED = {
    "home_page": "infer read control",
    "openapi": "infer read control",
    "docs_page": "infer read control",
    "server_metadata": "infer read control",
    "server_live": "all",
    "server_ready": "all",
    "health_check": "all",
    "health_watch": "all",
    "all_statistics": "read control",
    "model_metadata": "infer read control",
    "model_ready": "infer read control",
    "model_config": "infer read control",
    "model_statistics": "read control",
    "infer": "infer",
    "stream_infer": "infer",
    "generate": "infer",
    "generate_stream": "infer",
    "trace_settings": "read control",
    "update_trace_settings": "control",
    "log_settings": "read control",
    "update_log_settings": "control",
    "repository_index": "read control",
    "load_model": "control",
    "unload_model": "control",
    "set_label": "control",
    "remove_label": "control",
    "get_rollout": "read control",
    "start_rollout": "control",
    "update_rollout": "control",
    "delete_rollout": "control",
    "system_regions": "infer",
    "register_system": "infer",
    "unregister_system": "infer",
    "cuda_regions": "infer",
    "register_cuda": "infer",
    "unregister_cuda": "infer",
}
# A principal with other models gets an empty list of these, or a response without models.
WITHOUT_MODEL = {
    "home_page", "openapi", "docs_page", "server_metadata", "all_statistics", "stream_infer", "log_settings",
    "repository_index", "system_regions", "register_system", "unregister_system", "cuda_regions",
    "register_cuda", "unregister_cuda",
}  # fmt: skip
DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
CHANGES: dict[str, dict[str, Any]] = {
    "update_trace_settings": {"trace_rate": "7"},
    "update_log_settings": {"log_verbose_level": 1},
}


def bearer(name: str) -> dict[str, str]:
    """The header of a principal; none for an empty name."""
    return {"authorization": f"Bearer {KEYS.get(name, name)}"} if name else {}


def write_policy(directory: Path, text: str = POLICY, issuer: Issuer | None = None) -> Path:
    (directory / "keys").mkdir(exist_ok=True)
    for name, key in KEYS.items():
        (directory / "keys" / name).write_text(key + "\n")
    (directory / "jwks.json").write_bytes((issuer or Issuer()).jwks)
    path = directory / "access.toml"
    path.write_text(text)
    return path


@dataclass
class Place:
    """A server with a policy."""

    server: LocalServer
    issuer: Issuer
    policy: Path
    audit: Path
    control: str

    def lines(self, **wanted: str) -> list[dict[str, str]]:
        """The lines of the audit log with these fields."""
        whole = (line for line in self.audit.read_text().splitlines(keepends=True) if line.endswith("\n"))
        return [line for line in map(json.loads, whole) if wanted.items() <= line.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("access")
    copy_example(directory / "models", "simple")
    write_probe(directory / "models")
    issuer = Issuer()
    policy = write_policy(directory, POLICY, issuer)
    audit, control = directory / "audit.log", free_port()
    flags = [f"--access-policy={policy}", f"--audit-log={audit}", f"--control-port={control}"]
    with serving(directory / "models", flags=flags) as server:
        yield Place(server, issuer, policy, audit, f"127.0.0.1:{control}")


@pytest.fixture
def raw(place: Place) -> Iterator[RawClient]:
    with closing(RawClient(place.server.address)) as client:
        yield client


@pytest.fixture
def web(place: Place) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{place.server.http_address}") as client:
        yield client


def message_for(endpoint: Endpoint) -> bytes:
    """A request of an RPC; it names a model where it can, and changes a setting where it could."""
    kind = getattr(service_pb2, f"{endpoint.rpc}Request", None)
    if kind is None:
        return b""
    message = kind()
    for field in ("name", "model_name"):
        if field in kind.DESCRIPTOR.fields_by_name:
            setattr(message, field, "simple")
    for name, value in CHANGES.get(endpoint.name, {}).items():
        setting = message.settings[name]
        if isinstance(value, str):
            setting.value.append(value)
        else:
            setting.uint32_param = value
    return bytes(message.SerializeToString())


def call(raw: RawClient, endpoint: Endpoint, name: str) -> str:
    """Answer of an RPC to a principal: ``yes``, ``401`` or ``403``."""
    metadata = tuple(bearer(name).items())
    try:
        if endpoint.rpc.endswith("Watch"):
            method = raw.channel.unary_stream(endpoint.grpc_method)
            stream = method(b"", timeout=WAIT_S, metadata=metadata)
            next(stream)
            stream.cancel()
        elif endpoint.rpc == "ModelStreamInfer":
            answer = next(raw.stream([service_pb2.ModelInferRequest(model_name="simple")], metadata=metadata))
            if "may not do this" in answer.error_message:
                return "403"
        else:
            raw(endpoint.grpc_method, message_for(endpoint), metadata)
    except grpc.RpcError as error:
        status = error.code()
        if status is grpc.StatusCode.UNAUTHENTICATED:
            return "401"
        if status is grpc.StatusCode.PERMISSION_DENIED:
            assert f"principal '{name}' may not do this: it needs the role" in error.details()
            return "403"
    return "yes"


def request(web: httpx.Client, endpoint: Endpoint, path: str, name: str) -> str:
    body = CHANGES.get(endpoint.name)
    answer = web.request(endpoint.http_method, path, json=body, headers=bearer(name))
    if answer.status_code == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        return "401"
    if answer.status_code == 403:
        assert f"principal '{name}' may not do this: it needs the role" in answer.json()["error"]
        return "403"
    return "yes"


def paths_of(endpoint: Endpoint) -> list[str]:
    fields = {"model": "simple", "version": "1", "region": "simple", "repository": "r", "page": "index.md"}
    fields["label"], fields["action"] = "champion", "pause"
    paths = [path for template in endpoint.paths for path in path_variants(template)]
    return [re.sub(r"{(\w+)}", lambda field: fields[field[1]], path) for path in paths]


def expected(endpoint: Endpoint, name: str) -> str:
    allowed = ALLOWED[endpoint.name].split()
    if allowed == ["all"]:
        return "yes"
    if name in ("", "not-a-key-of-anyone"):
        return "401"
    if name == "others":
        return "yes" if endpoint.name in WITHOUT_MODEL else "403"
    return "yes" if ROLES[name] in allowed else "403"


CALLERS = ("", "not-a-key-of-anyone", "infers", "reads", "controls", "others")


def test_each_endpoint_has_a_row() -> None:
    assert list(ALLOWED) == [endpoint.name for endpoint in ENDPOINTS]


@pytest.mark.parametrize("name", CALLERS)
def test_every_rpc(place: Place, raw: RawClient, name: str) -> None:
    rpcs = [endpoint for endpoint in ENDPOINTS if endpoint.rpc]
    found = {each.name: call(raw, each, name) for each in rpcs}
    wanted = {each.name: expected(each, name) for each in rpcs}
    if name == "others":
        wanted["stream_infer"] = "403"  # by the model of its first request
    assert found == wanted


@pytest.mark.parametrize("name", CALLERS)
def test_every_route(place: Place, web: httpx.Client, name: str) -> None:
    routes = [(endpoint, path) for endpoint in ENDPOINTS for path in paths_of(endpoint)]
    found = {(each.http_method, path): request(web, each, path, name) for each, path in routes}
    wanted = {(each.http_method, path): expected(each, name) for each, path in routes}
    if name == "others":
        # Reads settings of the server as a whole, changes none.
        wanted["GET", "/v2/trace/setting"] = "yes"
    assert found == wanted


@pytest.mark.parametrize("name", CALLERS)
def test_reflection_needs_any_principal(raw: RawClient, name: str) -> None:
    method = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    stream = raw.channel.stream_stream(method)(
        iter([b""]), timeout=WAIT_S, metadata=tuple(bearer(name).items())
    )
    if name in KEYS:
        assert next(stream)
    else:
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("path", ["/metrics", "/", "/anything", "/v2/health/live", "/v2/health/ready"])
def test_the_metrics_port(place: Place, path: str, name: str) -> None:
    statuses = {"": 401, "not-a-key-of-anyone": 401, "infers": 403, "others": 403}
    if "/health/" in path:
        statuses = {}  # open to probes
    url = place.server.metrics_url.removesuffix("/metrics") + path
    answer = httpx.get(url, headers=bearer(name))
    assert answer.status_code == statuses.get(name, 200)
    if path == "/metrics" and answer.status_code == 200:
        assert 'conch_principal_requests_total{principal="infers"}' in answer.text
        assert 'conch_access_refused_total{reason="unauthenticated"}' in answer.text
        assert KEYS["infers"] not in answer.text


@pytest.mark.parametrize("name", CALLERS)
def test_the_control_port(place: Place, name: str) -> None:
    def outcome(method: Callable[[], Any]) -> str:
        try:
            method()
        except UnauthenticatedError:
            return "401"
        except PermissionDeniedError:
            return "403"
        except ConchError:
            pass  # let in, and then told that there is no such model
        return "yes"

    options = ConnectionOptions(place.control, token=KEYS.get(name, name) or None)
    with closing(ModelControlClient(options, timeout_s=WAIT_S)) as client:

        def watched() -> None:
            watch = client.watch()
            next(iter(watch))
            watch.cancel()

        methods: dict[str, Callable[[], Any]] = {
            "Load": lambda: client.load("none", {}),
            "Unload": lambda: client.unload("none", False),
            "SetLabel": lambda: client.set_label("none", "champion", 1),
            "StartRollout": lambda: client.start_rollout("none", {}),
            "UpdateRollout": lambda: client.update_rollout("none", "pause"),
            "GetRollout": lambda: client.rollout("simple"),
            "ListRollouts": client.rollouts,
            "Index": client.models,
            "Describe": lambda: client.describe("simple"),
            "Watch": watched,
        }
        # A drain can't be undone, so it is tried by those who may not.
        if name != "controls":
            methods["Drain"] = client.drain
        found = {method: outcome(run) for method, run in methods.items()}
        models = {model.name for model in client.models().models} if found["Index"] == "yes" else None
    assert methods.keys() | {"Drain"} == ACTIONS.keys()
    if name in ("", "not-a-key-of-anyone"):
        assert set(found.values()) == {"401"}
    reads = {"Index", "Describe", "Watch", "GetRollout", "ListRollouts"}
    allowed = {
        "infers": set(),
        "reads": reads,
        "controls": methods.keys(),
        "others": {"Index", "Watch", "ListRollouts"},
    }
    if name in allowed:
        assert {method for method, result in found.items() if result == "yes"} == allowed[name]
        assert set(found.values()) <= {"yes", "403"}
    assert models == {"reads": {"simple", "probe"}, "controls": {"simple", "probe"}, "others": set()}.get(
        name
    )


GUARDED = [f"/conch.control.v1.ModelControl/{method}" for method in ACTIONS]
GUARDED += [each.grpc_method for each in ENDPOINTS if each.rpc and ALLOWED[each.name] != "all"]


@pytest.mark.parametrize("method", GUARDED)
def test_no_message_is_received_without_credentials(place: Place, method: str) -> None:
    """The server received 200 MB from each of eight such callers, and took 1.2 GB."""
    never = threading.Event()
    address = place.control if "/conch.control" in method else place.server.address
    with closing(grpc.insecure_channel(address)) as channel:
        call = channel.stream_stream(method)(iter(lambda: never.wait(WAIT_S) and b"", None), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        never.set()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_principal_leaves_others_room_on_the_control_port(place: Place) -> None:
    most = MOST_WATCHES // 2
    refusal = f"{most} callers watch for principal 'others' already; try again when one of them has ended"
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                closing(ModelControlClient(ConnectionOptions(place.control, token=KEYS[name]), WAIT_S))
            )
            for name in ("others", "reads")
        }
        updates = []  # a watch ends with its iterator

        def watch(name: str) -> Any:
            watch = clients[name].watch()
            stack.callback(watch.cancel)
            updates.append(iter(watch))
            return next(updates[-1])

        for _ in range(most):
            watch("others")
        with pytest.raises(ResourceExhaustedError, match=refusal):
            watch("others")
        assert watch("reads")


def test_listings_show_what_the_principal_may_see(place: Place, raw: RawClient, web: httpx.Client) -> None:
    def seen(name: str) -> list[set[str]]:
        metadata = tuple(bearer(name).items())
        index = raw("RepositoryIndex", service_pb2.RepositoryIndexRequest(), metadata)
        statistics = raw("ModelStatistics", service_pb2.ModelStatisticsRequest(), metadata)
        headers = bearer(name)
        stats = web.get("/v2/models/stats", headers=headers).json()["model_stats"]
        return [
            {model.name for model in index.models},
            {model.name for model in statistics.model_stats},
            {model["name"] for model in web.post("/v2/repository/index", headers=headers).json()},
            {model["name"] for model in stats},
        ]

    assert seen("reads") == [{"simple", "probe"}] * 4
    assert seen("others") == [set()] * 4
    pages = {name: web.get("/", headers=bearer(name)).text for name in ("reads", "infers", "others")}
    assert {name: "simple" in page for name, page in pages.items()} == {
        "reads": True, "infers": True, "others": False
    }  # fmt: skip


@pytest.mark.parametrize(
    "path", ["", "/ready", "/config", "/stats", "/infer", "/generate", "/generate_stream", "/trace/setting"]
)
def test_forbidden_models_look_like_unknown_ones(web: httpx.Client, path: str) -> None:
    method = "POST" if path in ("/infer", "/generate", "/generate_stream") else "GET"
    answers = [
        web.request(method, f"/v2/models/{model}{path}", headers=bearer("others"))
        for model in ("simple", "unknown")
    ]
    texts = [answer.json()["error"].replace("unknown", "simple") for answer in answers]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert texts[0] == texts[1]


def test_forbidden_models_on_a_stream_look_like_unknown_ones(raw: RawClient) -> None:
    models = ("simple", "unknown", "other")
    requests = [service_pb2.ModelInferRequest(model_name=name, id=name) for name in models]
    found = list(raw.stream(requests, metadata=tuple(bearer("others").items())))
    texts = [each.error_message.replace("unknown", "simple") for each in found]
    assert [each.infer_response.id for each in found] == list(models)
    assert texts[0] == texts[1]
    assert "for model 'simple'" in texts[0]
    assert "unknown model" in found[2].error_message


def test_reading_settings_by_an_update_without_changes(raw: RawClient, web: httpx.Client) -> None:
    metadata = tuple(bearer("reads").items())
    assert raw("TraceSetting", service_pb2.TraceSettingRequest(), metadata).settings
    raw("LogSettings", service_pb2.LogSettingsRequest(), metadata)
    assert web.post("/v2/trace/setting", headers=bearer("reads"), content=b"{}").status_code == 200


def test_real_clients_with_keys_and_tokens(place: Place) -> None:
    inputs = simple_inputs()
    headers = bearer("infers")
    token = {"authorization": f"bearer {place.issuer.token()}"}
    with closing(triton.InferenceServerClient(place.server.address)) as client:
        for given in (headers, token):
            check_simple(client.infer("simple", inputs, headers=given))
        with pytest.raises(InferenceServerException, match="the token is not valid: Signature has expired"):
            client.infer("simple", inputs, headers={"authorization": f"Bearer {place.issuer.token(exp=1)}"})
        with pytest.raises(InferenceServerException, match="must be 'Bearer' and a key or a token"):
            client.infer("simple", inputs, headers={"authorization": KEYS["infers"]})
    with closing(http_triton.InferenceServerClient(place.server.http_address)) as web_client:
        assert web_client.is_model_ready("simple", headers=token)


@pytest.mark.parametrize("names", [("reads", "controls"), ("reads", "no-key"), ("no-key", "reads")])
def test_several_credentials_are_refused_on_every_port(
    place: Place, raw: RawClient, web: httpx.Client, names: tuple[str, str]
) -> None:
    sent = [pair for name in names for pair in bearer(name).items()]
    refusals = []
    with grpc.insecure_channel(place.control) as channel:
        control: Any = channel.unary_unary("/conch.control.v1.ModelControl/Index")
        reflection = raw.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        calls: tuple[Callable[[], Any], ...] = (
            lambda: raw("RepositoryIndex", service_pb2.RepositoryIndexRequest(), sent),
            lambda: next(reflection(iter([b""]), timeout=WAIT_S, metadata=sent)),
            lambda: control(b"", timeout=WAIT_S, metadata=sent),
        )
        for run in calls:
            with pytest.raises(grpc.RpcError) as refused:
                run()
            refusals.append((refused.value.code(), refused.value.details()))
    text = "there is more than one 'authorization' header: send one"
    assert refusals == [(grpc.StatusCode.UNAUTHENTICATED, text)] * len(calls)
    for answer in (
        web.post("/v2/repository/index", headers=sent),
        httpx.get(place.server.metrics_url, headers=sent),
    ):
        assert (answer.status_code, answer.json()) == (401, {"error": text})


def refused(raw: RawClient, name: str, model: str = "simple") -> dict[str, str] | None:
    """Trailing metadata of a refusal for a limit; None for another outcome."""
    try:
        raw.infer(service_pb2.ModelInferRequest(model_name=model), tuple(bearer(name).items()))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return dict(error.trailing_metadata())
    return None


def test_rates_are_told_with_the_time_to_wait(raw: RawClient, web: httpx.Client) -> None:
    assert refused(raw, "slow") is None
    told = refused(raw, "slow")
    assert told is not None
    assert 900_000 < int(told["grpc-retry-pushback-ms"]) <= 1_000_000
    answer = web.get("/v2/models/simple", headers=bearer("slow"))
    assert answer.status_code == 429
    assert 900 < int(answer.headers["retry-after"]) <= 1000
    assert "principal 'slow' is over its limit of 0.001 requests per second" in answer.json()["error"]
    assert refused(raw, "infers") is None


def test_requests_of_a_stream_count_one_by_one(raw: RawClient) -> None:
    requests = [service_pb2.ModelInferRequest(model_name="simple", id=str(number)) for number in range(3)]
    found = list(raw.stream(requests, metadata=tuple(bearer("heavy").items())))
    limited = ["0.001 bytes per second" in each.error_message for each in found]
    assert limited == [False, True, True]
    assert found[1].infer_response.parameters["retry_after_ms"].int64_param > 0


def test_the_opening_of_a_stream_counts_as_its_first_request(raw: RawClient) -> None:
    metadata = tuple(bearer("streams").items())
    request = service_pb2.ModelInferRequest(model_name="simple")
    found = list(raw.stream([request, request], metadata=metadata))
    assert ["0.001 requests per second" in each.error_message for each in found] == [False, True]
    reflection = raw.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    for stream in (
        raw.stream([], metadata=metadata),
        reflection(iter([b""]), timeout=WAIT_S, metadata=metadata),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        told = dict(refused.value.trailing_metadata())
        assert 900_000 < int(told["grpc-retry-pushback-ms"]) <= 1_000_000


def test_bytes_of_a_body_in_chunks_count(web: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"inputs": ['
        yield b"]}"

    first = web.post("/v2/models/simple/infer", headers=bearer("chunks"), content=chunks())
    assert first.status_code == 400  # bytes are on credit
    assert web.get("/v2/models/simple", headers=bearer("chunks")).status_code == 429


def test_requests_in_flight(place: Place, raw: RawClient, signal_files: tuple[Path, Path]) -> None:
    started, go = signal_files
    with closing(triton.InferenceServerClient(place.server.address)) as client:
        answers: list[Any] = []
        client.async_infer(
            "probe",
            probe_inputs(),
            callback=lambda result, error: answers.append(error),
            headers=bearer("single"),
            parameters={"started": str(started), "wait_for": str(go)},
        )
        eventually(started.exists, "the model runs")
        told = refused(raw, "single")
        assert told is not None
        assert told["grpc-retry-pushback-ms"] == "100"
        go.touch()
        eventually(lambda: refused(raw, "single") is None, "the request has ended")
        eventually(lambda: answers == [None], "it is answered")
        assert refused(raw, "single") is None  # the one before was no valid request, and holds no place
    eventually(lambda: place.lines(principal="single"), "it is audited")
    line = place.lines(principal="single", code="RESOURCE_EXHAUSTED")[0]
    assert (line["action"], line["model"]) == ("infer", "simple")


def test_changes_and_refusals_are_audited(place: Place, web: httpx.Client, raw: RawClient) -> None:
    web.post("/v2/repository/models/simple/load", headers=bearer("controls"))
    web.post("/v2/repository/models/simple/load", headers=bearer("infers"))
    web.post("/v2/logging", headers=bearer("controls"), json={"log_verbose_level": 1})

    def lines() -> list[tuple[str, ...]]:
        fields = ("principal", "action", "model", "code")
        return [tuple(line[field] for field in fields) for line in place.lines(port="http")]

    wanted = [
        ("controls", "load_model", "simple", "UNAVAILABLE"),
        ("infers", "load_model", "simple", "PERMISSION_DENIED"),
        ("controls", "update_log_settings", "*", "UNSUPPORTED"),
    ]
    eventually(lambda: lines()[-3:] == wanted, "they are written")
    assert not any(key in place.audit.read_text() for key in KEYS.values())


def test_a_revoked_key_ends_open_streams(tmp_path: Path) -> None:
    copy_example(tmp_path / "models", "simple")
    policy = write_policy(tmp_path)
    with (
        serving(tmp_path / "models", flags=[f"--access-policy={policy}"]) as server,
        closing(RawClient(server.address)) as raw,
    ):
        asked = service_pb2.ModelInferRequest(model_name="simple")

        def requests() -> Iterator[Any]:
            yield asked
            (tmp_path / "keys" / "infers").write_text("another-key-of-infers")
            while not revoked:
                yield asked

        revoked: list[str] = []
        for answer in raw.stream(requests(), metadata=tuple(bearer("infers").items())):
            if "unknown credentials" in answer.error_message:
                revoked.append(answer.error_message)
        assert revoked


def test_a_watch_shows_what_the_policy_in_effect_allows(tmp_path: Path) -> None:
    for name in ("hidden", "shown"):
        write_probe(tmp_path / "models", name)
    policy, key = tmp_path / "access.toml", tmp_path / "key"
    key.write_text(KEYS["reads"])
    text = '[[principal]]\nname = "reads"\nkey_file = "key"\nread = ["{}"]\ncontrol = ["shown"]\n'
    policy.write_text(text.format("*"))
    flags = [f"--access-policy={policy}", "--model-control-mode=explicit", "--load-model=*"]
    control = free_port()
    options = ConnectionOptions(f"127.0.0.1:{control}", token=KEYS["reads"])
    with (
        serving(tmp_path / "models", flags=[*flags, f"--control-port={control}"]) as server,
        closing(ModelControlClient(options, timeout_s=WAIT_S)) as client,
    ):
        watch = client.watch(whole_state=True)
        updates = iter(watch)
        state = next(updates).state
        assert state is not None and {model.name for model in state.models} == {"hidden", "shown"}
        policy.write_text(text.format("shown"))
        eventually(lambda: len(client.models().models) == 1, "the change is in effect")
        server.server.unload("hidden")
        client.unload("shown", False)
        seen: set[str] = set()
        while "shown" not in seen:
            seen |= {event.model for event in next(updates).events}
        watch.cancel()
    assert seen == {"shown"}


def test_principals_may_load_files_from_anywhere(tmp_path: Path) -> None:
    write_probe(tmp_path / "models")
    policy = write_policy(tmp_path)
    flags = [f"--access-policy={policy}", "--model-control-mode=explicit", "--load-model=probe"]
    remote = {"x-forwarded-for": "192.0.2.1"}
    with (
        serving(tmp_path / "models", flags=flags) as server,
        closing(http_triton.InferenceServerClient(server.http_address)) as client,
    ):
        config = client.get_model_config("probe", headers=bearer("infers"))
        files = {"file:1/model.py": (tmp_path / "models/probe/1/model.py").read_bytes()}
        load = partial(client.load_model, "probe", config=json.dumps(config), files=files)
        load(headers=bearer("controls") | remote)
        with pytest.raises(InferenceServerException, match="needs the role 'control' for model 'probe'"):
            load(headers=bearer("infers"))


def test_callers_without_credentials_may_be_a_principal(tmp_path: Path) -> None:
    copy_example(tmp_path / "models", "simple")
    policy = tmp_path / "access.toml"
    policy.write_text('[[principal]]\nname = "anyone"\nanonymous = true\ninfer = ["*"]\n')
    with serving(tmp_path / "models", flags=[f"--access-policy={policy}"]) as server:
        url = f"http://{server.http_address}"
        assert httpx.get(f"{url}/v2/models/simple").status_code == 200
        assert httpx.get(f"{url}/v2/models/stats").status_code == 403
        assert httpx.get(f"{url}/v2/models/simple", headers=bearer("infers")).status_code == 401


def test_certificates_name_principals(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    key, certificate = authority.issue("server")
    clients = {name: authority.issue(name) for name in ("named", "workload", "stranger")}
    copy_example(tmp_path / "models", "simple")
    policy = tmp_path / "access.toml"
    policy.write_text(
        '[[principal]]\nname = "web"\ncertificate = ["cn:named", "uri:spiffe://conch.test/workload"]\n'
        'infer = ["*"]\nread = ["*"]\n'
    )
    control = free_port()
    flags = [f"--access-policy={policy}", "--grpc-use-ssl-mutual=true", f"--control-port={control}"]
    for port in ("grpc", "http", "control"):
        flags += [f"--{port}-server-cert={certificate}", f"--{port}-server-key={key}"]
        flags += [f"--{port}-root-cert={authority.root}"]
    flags += ["--http-use-ssl", "--metrics-use-ssl", "--control-use-ssl"]
    with serving(tmp_path / "models", flags=flags) as server:
        for name, (client_key, client_certificate) in clients.items():
            pem = [path.read_bytes() for path in (authority.root, client_key, client_certificate)]
            channel = grpc.secure_channel(server.address, grpc.ssl_channel_credentials(*pem))
            ready = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
            with closing(channel):
                if name != "stranger":
                    ready(b"", timeout=WAIT_S)
                else:
                    with pytest.raises(grpc.RpcError) as unknown:
                        ready(b"", timeout=WAIT_S)
                    assert unknown.value.code() is grpc.StatusCode.UNAUTHENTICATED
            tls = ssl.create_default_context(cafile=authority.root)
            tls.load_cert_chain(client_certificate, client_key)
            status = 200 if name != "stranger" else 401
            assert (
                httpx.get(f"https://{server.http_address}/v2/models/simple", verify=tls).status_code == status
            )
            assert httpx.get(server.metrics_url, verify=tls).status_code == status
            options = ConnectionOptions(f"127.0.0.1:{control}", ClientTls(pem[0], pem[1], pem[2]))
            with closing(ModelControlClient(options, timeout_s=WAIT_S)) as operator:
                if name != "stranger":
                    assert [model.name for model in operator.models().models] == ["simple"]
                else:
                    with pytest.raises(UnauthenticatedError):
                        operator.models()
