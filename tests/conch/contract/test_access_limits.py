"""Limits of a principal with many clients at once: connections, streams, protocols and fronts share them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.support.fronts import front_metrics
from tests.support.grpc_transports import TRANSPORTS
from tests.support.raw_http import raw_http, request
from tests.support.servers import WAIT_S, LocalServer, RawClient, eventually, serving, write_probe
from tritonclient.grpc import service_pb2

RATE, BYTES, PLACES = 1, 2_000, 3
SIZE = 2_000
"""Bytes of a request, at least."""
POLICY = "".join(
    f'[[principal]]\nname = "{name}"\nkey_file = "{name}"\ninfer = ["*"]\n{limit}\n'
    for name, limit in {
        "free": 'read = ["*"]',
        "rated": f"requests_per_second = {RATE}",
        "sized": f"bytes_per_second = {BYTES}",
        "placed": f"concurrent = {PLACES}",
        "replaced": "",
    }.items()
)
FRONTS = pytest.param(("--front-ends=2",), marks=pytest.mark.slow, id="fronts")
GRPCIO = pytest.param(TRANSPORTS["grpcio"], marks=pytest.mark.slow, id="grpcio")
EACH = 40
"""Requests of each attacking client."""
STREAMS = 3


def key(name: str) -> tuple[str, str]:
    return "authorization", f"Bearer the-key-of-{name}-1"


def message(**parameters: str) -> Any:
    made = service_pb2.ModelInferRequest(model_name="probe", id="x" * SIZE, raw_input_contents=[bytes(4)])
    made.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    for name, value in parameters.items():
        made.parameters[name].string_param = value
    return made


def body(**parameters: str) -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    return json.dumps({"id": "x" * SIZE, "inputs": [tensor], "parameters": parameters}).encode()


Outcomes = Iterator[str]
Sender = Callable[[LocalServer, str, int, dict[str, str]], Outcomes]
"""Sends so many requests of a principal with these parameters; gives what came of each."""


def outcome(error: str) -> str:
    return "limited" if "is over its limit of" in error else error or "ok"


def over_grpc(server: LocalServer, name: str, number: int, parameters: dict[str, str]) -> Outcomes:
    with closing(RawClient(server.address, ("grpc.use_local_subchannel_pool", 1))) as client:
        for _ in range(number):
            try:
                client.infer(message(**parameters), [key(name)])
                yield "ok"
            except grpc.RpcError as error:
                yield outcome(str(error.details()))


def over_a_stream(server: LocalServer, name: str, number: int, parameters: dict[str, str]) -> Outcomes:
    with closing(RawClient(server.address, ("grpc.use_local_subchannel_pool", 1))) as client:
        try:
            requests = [message(**parameters)] * number
            for answer in client.stream(requests, metadata=[key(name)]):
                yield outcome(answer.error_message)
        except grpc.RpcError as error:  # the opening was too much
            yield outcome(str(error.details()))


def over_http(server: LocalServer, name: str, number: int, parameters: dict[str, str]) -> Outcomes:
    with httpx.Client(base_url=f"http://{server.http_address}", timeout=WAIT_S) as client:
        for count in range(number):
            content: Any = body(**parameters)
            if count % 2:
                content = iter([content[:9], content[9:]])  # in chunks, without a length
            answer = client.post("/v2/models/probe/infer", content=content, headers=dict([key(name)]))
            yield "ok" if answer.status_code == 200 else outcome(answer.json()["error"])


SENDERS: tuple[Sender, ...] = (over_grpc, over_grpc, *[over_a_stream] * STREAMS, over_http, over_http)


@dataclass
class Attack:
    """Outcomes of the requests of all clients, and the seconds that they took."""

    outcomes: Counter[str]
    seconds: float = 0.0


@contextmanager
def attacking(
    server: LocalServer, name: str, number: int, parameters: dict[str, str] | None = None
) -> Iterator[Attack]:
    """Has all kinds of clients of a principal send at once; at the end of the block all have ended."""
    attack = Attack(Counter())
    lock = threading.Lock()

    def run(sender: Sender) -> None:
        for found in sender(server, name, number, parameters or {}):
            with lock:
                attack.outcomes[found] += 1

    threads = [threading.Thread(target=run, args=(sender,)) for sender in SENDERS]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        yield attack
    finally:
        for thread in threads:
            thread.join(WAIT_S)
        attack.seconds = time.monotonic() - start


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a server: a policy with principals that have one limit each, their keys, a model."""
    directory = tmp_path_factory.mktemp("limits")
    write_probe(directory / "models", extra="instance_group { count: 8 }")
    for name in ("free", "rated", "sized", "placed", "replaced"):
        (directory / name).write_text(key(name)[1].removeprefix("Bearer "))
    (directory / "access.toml").write_text(POLICY)
    return directory


@pytest.fixture(scope="module", params=[pytest.param((), id="one_process"), FRONTS, GRPCIO])
def server(directory: Path, request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """The server, with and without front processes, and on grpcio; several requests run at a time."""
    flags = [f"--access-policy={directory / 'access.toml'}"]
    with serving(directory / "models", flags=[*flags, *request.param]) as server:
        yield server


def connections(server: LocalServer) -> list[float]:
    """The connections of each front."""
    return front_metrics(server, "conch_front_connections", key("free"))


def check_free(server: LocalServer) -> None:
    """Another principal is not limited meanwhile."""
    for sender in (over_grpc, over_a_stream, over_http):
        assert list(sender(server, "free", 3, {})) == ["ok"] * 3


def test_clients_share_the_rate_of_their_principal(server: LocalServer) -> None:
    with attacking(server, "rated", EACH) as attack:
        check_free(server)
    assert set(attack.outcomes) == {"ok", "limited"}
    assert attack.outcomes["ok"] <= RATE * (attack.seconds + 1) + 1


def test_clients_share_the_bytes_of_their_principal(server: LocalServer) -> None:
    """On credit are requests whose size is not known as they begin: a stream's first, and those in chunks."""
    with attacking(server, "sized", EACH) as attack:
        check_free(server)
    assert set(attack.outcomes) == {"ok", "limited"}
    on_credit = (len(SENDERS) + 1) * SIZE
    assert attack.outcomes["ok"] * SIZE <= BYTES * (attack.seconds + 1) + on_credit


def test_clients_share_the_places_of_their_principal(server: LocalServer, tmp_path: Path) -> None:
    """Also clients that have gone hold theirs until their requests have ended."""
    go = tmp_path / "go"

    def attacked() -> bool:
        """True if clients were at all fronts: one that has no processor time gets no connections."""
        with attacking(server, "placed", 1, {"wait_for": str(go)}) as attack:
            limited = len(SENDERS) - PLACES
            eventually(lambda: attack.outcomes["limited"] == limited, "all others are refused")
            spread = all(connections(server))
            assert list(over_a_stream(server, "placed", 5, {})) == ["limited"] * 5
            check_free(server)
            go.touch()
        assert attack.outcomes == {"limited": limited, "ok": PLACES}
        go.unlink()
        return spread

    eventually(attacked, "clients are at all fronts")

    started = [tmp_path / f"started{number}" for number in range(PLACES)]
    with ExitStack() as stack:
        for path in started:
            ask = body(started=str(path), wait_for=str(go))
            client = stack.enter_context(raw_http(server.http_address))
            client.send(request("POST", "/v2/models/probe/infer", ask, ": ".join(key("placed"))))
            eventually(path.exists, "it runs")
    assert list(over_grpc(server, "placed", 3, {})) == ["limited"] * 3
    go.touch()
    eventually(lambda: list(over_grpc(server, "placed", 1, {})) == ["ok"], "they have ended")


@pytest.mark.parametrize("server", [FRONTS], indirect=True)
def test_a_reload_holds_for_the_connections_of_all_fronts_at_once(
    server: LocalServer, directory: Path
) -> None:
    """Once one connection finds the key replaced, so do all others, of both protocols."""
    file, credentials = directory / "replaced", key("replaced")

    def grpc_admits(client: RawClient) -> bool:
        try:
            client.infer(message(), [credentials])
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False
        return True

    def http_admits(client: httpx.Client) -> bool:
        answer = client.post("/v2/models/probe/infer", content=body(), headers=dict([credentials]))
        assert answer.status_code in (200, 401)
        return answer.status_code == 200

    eventually(lambda: connections(server) == [0, 0], "no client is left")
    with ExitStack() as stack:
        raw = [RawClient(server.address, ("grpc.use_local_subchannel_pool", 1)) for _ in range(2)]
        rest = [httpx.Client(base_url=f"http://{server.http_address}", timeout=WAIT_S) for _ in range(2)]
        for each in raw:
            stack.callback(each.close)
        for client in rest:
            stack.callback(client.close)
        calls = [partial(grpc_admits, each) for each in raw]
        assert all(call() for call in calls)
        eventually(lambda: connections(server) == [1, 1], "each has one")
        calls += [partial(http_admits, each) for each in rest]
        assert all(call() for call in calls)
        eventually(lambda: connections(server) == [2, 2], "each has two")
        original = file.read_text()
        file.write_text("another-key-of-replaced")
        eventually(lambda: not calls[0](), "the key is replaced")
        assert not any(call() for call in calls)
        file.write_text(original)
        eventually(calls[-1], "the key is back")
        assert all(call() for call in calls)
