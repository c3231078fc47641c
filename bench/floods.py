"""Delays of others while one client floods the server: `python -m bench.floods`, see bench/README.md.

The attacker, the prober and the server are processes of their own. The prober asks on one connection for each
port, in turn. The attacker has a lower priority, as it would have a machine of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import re
import selectors
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import psutil
from tests.support.attacks import HEALTH, INFER, STREAM, STRINGS, STRINGS_CONFIG, infer_bodies
from tests.support.certificates import Authority
from tests.support.floods import FLOODS, LARGE, LARGE_CONFIG
from tests.support.genai_models import random_model
from tests.support.http2_peer import (
    END_STREAM,
    MAX_WINDOW,
    PREFACE,
    call_pairs,
    data,
    header_block,
    headers,
    initial_window,
    message,
    ping,
    window_update,
)
from tests.support.raw_http import head, infer_body, request
from tests.support.servers import (
    ServerProcess,
    copy_example,
    free_port,
    serving_process,
    simple_request,
    write_model,
)
from tests.support.text_models import text_model
from tritonclient.grpc import service_pb2

from bench.delays import Http
from bench.servers import FRONT

MODELS = 2000
"""Models that are listed, and not loaded."""
CONNECTIONS = 200
"""The limit of the server, on each port."""
SESSION_BYTES = 24 << 20
"""Sent on one connection of HTTP/2: below its window."""
PLAIN_BYTES = 256 << 20
NICE = 5
PORTS = ("gRPC health", "gRPC infer", "HTTP health", "HTTP infer", "OpenAI", "metrics")
FLAGS = (
    "--model-control-mode=explicit",
    *(f"--load-model={name}" for name in ("simple", "strings", "large", "text", "tiny")),
    f"--grpc-max-connections={CONNECTIONS}",
    f"--http-max-connections={CONNECTIONS}",
)
SETTLED_S = 5.0

LIVE, INDEX = "/v2/health/live", "/v2/repository/index"
END = b"the end!"
OPENING = PREFACE + initial_window(MAX_WINDOW) + window_update(0, MAX_WINDOW - 65535)
TEXT = """
def complete(self, request):
    yield "a"
"""


@dataclass(frozen=True)
class Session:
    """Bytes that an attacker sends on each of its connections.

    Attributes:
        port: The port.
        sent: The bytes.
        end: Answer after which a new connection takes the place of this one; b"" to send them again on it,
            and None to keep it open.
        reads: True if the client reads answers.
        times: Number of connections for each that was asked for.
    """

    port: str
    sent: bytes
    end: bytes | None = b""
    reads: bool = True
    times: int = 1


def _rounds(name: str) -> Session:
    sent = bytearray(OPENING)
    for number in range(FLOODS[name].rounds):
        sent += FLOODS[name].frames(number)
        if len(sent) > SESSION_BYTES // 3:
            break
    return Session("grpc", bytes(sent) + ping(END), END)


def _calls(path: str, content: bytes, count: int, *more: tuple[str, str]) -> bytes:
    block = header_block(*call_pairs(path), *more)
    prefixed = bytes([bool(more)]) + message(content)[1:]
    parts = [prefixed[start : start + (1 << 20)] for start in range(0, len(prefixed), 1 << 20)]
    flags = [0] * (len(parts) - 1) + [END_STREAM]
    return OPENING + b"".join(
        headers(stream, block)
        + b"".join(data(stream, part, flag) for part, flag in zip(parts, flags, strict=True))
        for stream in range(1, 2 * count, 2)
    )


def _message(make: Callable[[], bytes], path: str) -> Session:
    content = make()
    return Session("grpc", _calls(path, content, SESSION_BYTES // len(content)) + ping(END), END)


def _zipped() -> bytes:
    asked = service_pb2.ModelInferRequest(model_name="large", raw_input_contents=[bytes(PLAIN_BYTES)])
    asked.inputs.add(name="IN", datatype="INT32", shape=[PLAIN_BYTES // 4])
    return gzip.compress(asked.SerializeToString(), 1)


def _large() -> bytes:
    asked = service_pb2.ModelInferRequest(model_name="large", raw_input_contents=[bytes(4)])
    asked.inputs.add(name="IN", datatype="INT32", shape=[1])
    return bytes(asked.SerializeToString())


def _hello() -> bytes:
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), sent, server_hostname="localhost"
        ).do_handshake()
    return sent.read()


def _openai(**fields: object) -> Session:
    body = {"model": "text", "prompt": "a", "max_tokens": 1} | fields
    return Session("openai", request("POST", "/v1/completions", json.dumps(body).encode()))


def _large_http() -> bytes:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}
    body = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    return request("POST", "/v2/models/large/infer", json.dumps(body).encode())


SESSIONS: dict[str, Callable[[], Session]] = {
    **{
        name: lambda name=name: _rounds(name)  # type: ignore[misc]
        for name in (
            "empty messages",
            "DATA of one byte",
            "acknowledgements of PING",
            "PRIORITY",
            "unknown frames",
            "RST_STREAM of a closed stream",
            "HEADERS of a closed stream",
            "cheap calls",
            "answered calls reset",
        )
    },
    "index": lambda: Session(
        "grpc",
        _calls("/inference.GRPCInferenceService/RepositoryIndex", b"", 200) + ping(END),
        END,
    ),
    "gzip": lambda: Session("grpc", _calls(INFER, _zipped(), 8, ("grpc-encoding", "gzip")) + ping(END), END),
    "unread answers": lambda: Session("grpc", _calls(INFER, _large(), 500), None, reads=False),
    "unread small answers": lambda: Session(
        "grpc", PREFACE + initial_window(0) + FLOODS["empty messages"].frames(0) * 10, None, reads=False
    ),
    "patterns": lambda: _openai(model="tiny", structured_outputs={"regex": "(a|b){1,2000}" * 3}),
    "idle": lambda: Session("grpc", OPENING, None, times=64),
    "idle HTTP": lambda: Session("http", b"", None, times=64),
    "ClientHello": lambda: Session("grpc", _hello(), b"\x16\x03\x03"),
    "ClientHello HTTP": lambda: Session("http", _hello(), b"\x16\x03\x03"),
    "pipelined HTTP": lambda: Session("http", request("GET", LIVE) * 1000),
    "chunks": lambda: Session(
        "http",
        head("POST", "/v2/models/simple/infer", "Transfer-Encoding: chunked")
        + b"1\r\n \r\n" * 60_000
        + b"0\r\n\r\n",
    ),
    "gzip HTTP": lambda: Session(
        "http",
        request(
            "POST", "/v2/models/simple/infer", gzip.compress(b" " * (60 << 20)), "Content-Encoding: gzip"
        ),
    ),
    "unread answers HTTP": lambda: Session("http", _large_http() * 100, reads=False),
    "index HTTP": lambda: Session("http", request("POST", INDEX) * 100),
    "scrapes": lambda: Session("metrics", request("GET", "/metrics") * 100),
    "token ids": lambda: _openai(prompt=[1] * 10_000_000),
    "stops": lambda: _openai(stop=["a"] * 1_000_000),
    "model name": lambda: _openai(model="a" * (60 << 20)),
    "prompts": lambda: _openai(prompt=["a"] * 2048, n=7),
    "answers": lambda: _openai(prompt=["a"] * 16, n=8),
    **{
        f"message of {name}{kind}": lambda make=make, path=path: _message(make, path)  # type: ignore[misc]
        for name, make in infer_bodies("strings", 3 << 20).items()
        for kind, path in (("", INFER), (", stream", STREAM))
    },
}
QUICK = ("empty messages",)
"""The worst."""


class _Attack:
    """One connection of the attacker."""

    def __init__(self, session: Session, address: tuple[str, int], selector: selectors.BaseSelector) -> None:
        self.opened = self.sent = 0
        self._session, self._address, self._selector = session, address, selector
        self._view = memoryview(session.sent)
        self._open()

    def _open(self) -> None:
        self.opened += 1
        self._left, self._tail = self._view, b""
        self._socket = socket.create_connection(self._address)
        self._socket.setblocking(False)
        events = selectors.EVENT_READ if self._session.reads else 0
        self._selector.register(self._socket, events | selectors.EVENT_WRITE, self)

    def on_ready(self, events: int) -> None:
        try:
            again = self._read() if events & selectors.EVENT_READ else False
            if events & selectors.EVENT_WRITE and not again:
                self._write()
        except BlockingIOError:
            return
        except OSError:
            again = True
        if again:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._open()

    def _read(self) -> bool:
        got, end = self._socket.recv(1 << 18), self._session.end
        found, self._tail = self._tail + got, got[-len(END) :]
        return not got or bool(end and end in found)

    def _write(self) -> None:
        count = self._socket.send(self._left[: 1 << 18])
        self.sent += count
        self._left = self._left[count:]
        if not self._left and self._session.end == b"":
            self._left = self._view
        elif not self._left:
            self._selector.modify(self._socket, selectors.EVENT_READ, self)


def attack(pipe: Connection, name: str, addresses: Mapping[str, str], connections: int) -> None:
    """Floods the server until the pipe's other end says so; then sends what it did."""
    os.nice(NICE)
    session = SESSIONS[name]()
    host, _, port = addresses[session.port].rpartition(":")
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        attacks = [_Attack(session, (host, int(port)), selector) for _ in range(connections * session.times)]
        begin = time.perf_counter()
        pipe.send(None)
        while not pipe.poll():
            for key, events in selector.select():
                if key.data is not None:
                    key.data.on_ready(events)
        pipe.send((time.perf_counter() - begin, sum(a.sent for a in attacks), sum(a.opened for a in attacks)))


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def probe(
    pipe: Connection, addresses: Mapping[str, str], root: Path | None, pids: Sequence[int], seconds: float
) -> None:
    """Asks each port in turn; sends, by port, the times of its answers and the server's CPU time meanwhile."""
    trusts = None if root is None else ssl.create_default_context(cafile=root)
    if root is None:
        channel = grpc.insecure_channel(addresses["grpc"])
    else:
        channel = grpc.secure_channel(addresses["grpc"], grpc.ssl_channel_credentials(root.read_bytes()))
    health, infer = channel.unary_unary(HEALTH), channel.unary_unary(INFER)
    simple = simple_request().SerializeToString()
    tensors = [infer_body(name, "INT32", list(range(16))) for name in ("INPUT0", "INPUT1")]
    body = json.dumps({"inputs": [json.loads(each)["inputs"][0] for each in tensors]}).encode()
    asks: tuple[Callable[[], object], ...] = (
        lambda: health(b""),
        lambda: infer(simple),
        Http(addresses["http"], "GET", LIVE, tls=trusts),
        Http(addresses["http"], "POST", "/v2/models/simple/infer", body, tls=trusts),
        Http(addresses["openai"], "GET", "/v1/models", tls=trusts),
        Http(addresses["metrics"], "GET", "/metrics", tls=trusts),
    )
    ask = dict(zip(PORTS, asks, strict=True))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ask}
    for each in ask.values():
        each()
    pipe.send(None)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, each in ask.items():
            before, cpu = time.perf_counter(), _cpu_s(pids)
            each()
            found[name].append((time.perf_counter() - before, _cpu_s(pids) - cpu))
            time.sleep(0.002)
    pipe.send(found)


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process that has said that it is ready."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(theirs, *arguments), daemon=True
    )
    process.start()
    theirs.close()
    ours.recv()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _tree(server: ServerProcess, part: str = "") -> list[psutil.Process]:
    """The server's process and its children with this in their command lines."""
    process = psutil.Process(server.process.pid)
    return [process, *(each for each in process.children(recursive=True) if part in " ".join(each.cmdline()))]


def _resident(server: ServerProcess) -> int:
    total = 0
    for each in _tree(server):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total >> 20


def _delays(
    server: ServerProcess, root: Path | None, seconds: float
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """What the prober finds, and the most megabytes that the server has meanwhile."""
    pids = [each.pid for each in _tree(server, FRONT)]
    most = _resident(server)
    with _process(probe, _addresses(server), root, pids, seconds) as prober:
        while not prober.poll(0.1):
            most = max(most, _resident(server))
        return prober.recv(), most


def _addresses(server: ServerProcess) -> dict[str, str]:
    metrics = server.metrics_url.partition("//")[2].partition("/")[0]
    openai = re.search(r"\| OpenAI +\| https?://([^/\s]+)", server.output)
    assert openai, server.output
    return {"grpc": server.address, "http": server.http_address, "metrics": metrics, "openai": openai[1]}


def _ms(found: list[tuple[float, float]]) -> str:
    taken = sorted(each * 1e3 for each, _ in found)
    return f"{taken[len(taken) // 2]:.1f} / {taken[len(taken) * 99 // 100]:.1f} / {taken[-1]:.1f}"


def _write_models(root: Path) -> None:
    copy_example(root, "simple")
    write_model(root, "strings", STRINGS_CONFIG, {"model.py": STRINGS})
    write_model(root, "large", LARGE_CONFIG, {"model.py": LARGE})
    text_model(root, TEXT, "text")
    random_model(root)
    for number in range(MODELS):
        write_model(root, f"unloaded_{number}", 'backend: "python"')


def _row(server: ServerProcess, root: Path | None, name: str, connections: int, seconds: float) -> str:
    alone, before = _delays(server, root, seconds / 6)
    with _process(attack, name, _addresses(server), connections) as attacker:
        found, most = _delays(server, root, seconds)
        attacker.send(None)
        took_s, sent, opened = attacker.recv()
    end = time.monotonic() + SETTLED_S
    while (after := _resident(server)) > before + 50 and time.monotonic() < end:
        time.sleep(0.1)
    every = [each for all_ in alone.values() for each in all_]
    cpu = max(each for all_ in found.values() for _, each in all_) * 1e3
    columns = [_ms(each) for each in (every, *found.values())]
    rates = f"{sent / took_s / 1e6:.1f} | {opened / took_s:.0f}"
    return f"{' | '.join(columns)} | {cpu:.0f} | {rates} | {before} / {most} / {after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the delays beside each flood."""
    parser = argparse.ArgumentParser(prog="bench.floods")
    parser.add_argument(
        "--only", default="", help="a part of the names of the floods; all but messages without"
    )
    parser.add_argument("--quick", action="store_true", help="the worst of them only")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long a flood lasts")
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--fronts", type=int, nargs="*", default=[0, 2])
    given = parser.parse_args(arguments)
    names = [name for name in SESSIONS if given.only in name and (given.only or "message of" not in name)]
    if given.quick:
        names = [name for name in names if name in QUICK]
    ports = ("alone, all ports", *PORTS)
    print(
        "| flood | connections | fronts |",
        " | ".join(ports),
        "| most CPU, ms | MB/s | opened/s | memory, MB |",
    )
    print("|---" * (7 + len(ports)) + "|")
    with tempfile.TemporaryDirectory() as directory:
        models, authority = Path(directory, "models"), Authority(Path(directory, "authority"))
        models.mkdir()
        _write_models(models)
        key, certificate = authority.issue("server")
        for fronts in given.fronts:
            for tls in (False, True):
                chosen = [name for name in names if ("ClientHello" in name) == tls]
                flags = [f"--front-ends={fronts}", *FLAGS, f"--openai-port={free_port()}"]
                if tls:
                    flags += [f"--tls-cert={certificate}", f"--tls-key={key}"]
                if chosen:
                    with serving_process(models, flags=flags) as server:
                        for name in chosen:
                            for connections in given.connections:
                                row = _row(
                                    server, authority.root if tls else None, name, connections, given.seconds
                                )
                                print(f"| {name} | {connections} | {fronts} | {row} |", flush=True)


if __name__ == "__main__":
    main()
