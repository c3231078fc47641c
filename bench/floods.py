"""Delays of others while one client floods the server: `python -m bench.floods`, see bench/README.md.

The attacker, the prober and the server are processes of their own. The prober asks on a connection for each
port, in turn. The attacker has a lower priority, as it would have a machine of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from multiprocessing.connection import Connection
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector, DefaultSelector

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
from tests.support.text_models import COMPLETIONS, text_model
from tritonclient.grpc import service_pb2

from bench.delays import Ended, Http
from bench.servers import FRONT

UNLOADED, CONNECTIONS, IDLE = 2000, 200, 64
"""Models that are only listed; the server's limit of connections; idle ones for each of the attacker's."""
MIB = 1 << 20
ROUNDS, SESSION_BYTES, PLAIN_BYTES = 100, 24 * MIB, 256 * MIB
SETTLED_S = 5.0
INDEX, LIVE = "/inference.GRPCInferenceService/RepositoryIndex", "/v2/health/live"
END, SERVER_HELLO = b"the end!", b"\x16\x03\x03"
OPENING = PREFACE + initial_window(MAX_WINDOW) + window_update(0, MAX_WINDOW - 65535)
PORTS = ("gRPC health", "gRPC infer", "HTTP health", "HTTP infer", "OpenAI", "metrics")
TEXT = """
def complete(self, request):
    yield "a"
"""
FLAGS = (
    "--model-control-mode=explicit",
    *(f"--load-model={name}" for name in ("simple", "strings", "large", "text", "tiny")),
    f"--grpc-max-connections={CONNECTIONS}",
    f"--http-max-connections={CONNECTIONS}",
)
Found = dict[str, list[tuple[float, float]]]


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


def _frames(name: str) -> Session:
    flood = FLOODS[name]
    sent = b"".join(map(flood.frames, range(min(flood.rounds, ROUNDS))))
    return Session("grpc", OPENING + sent + ping(END), END)


def _calls(path: str, content: bytes, count: int, *more: tuple[str, str], reads: bool = True) -> Session:
    block, sent = header_block(*call_pairs(path), *more), bytes([bool(more)]) + message(content)[1:]
    parts = [sent[start : start + MIB] for start in range(0, len(sent), MIB)]
    whole = b"".join(
        headers(stream, block)
        + b"".join(data(stream, part, END_STREAM * (part is parts[-1])) for part in parts)
        for stream in range(1, 2 * count, 2)
    )
    return Session("grpc", OPENING + whole + ping(END), END if reads else None, reads)


def _body(make: Callable[[], bytes], path: str) -> Session:
    content = make()
    return _calls(path, content, SESSION_BYTES // len(content))


def _large(size: int) -> bytes:
    asked = service_pb2.ModelInferRequest(model_name="large", raw_input_contents=[bytes(4 * size)])
    asked.inputs.add(name="IN", datatype="INT32", shape=[size])
    return bytes(asked.SerializeToString())


def _hello(port: str) -> Session:
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="a").do_handshake()
    return Session(port, sent.read(), SERVER_HELLO)


def _post(port: str, path: str, body: object, times: int = 1, reads: bool = True) -> Session:
    return Session(port, request("POST", path, json.dumps(body).encode()) * times, reads=reads)


def _openai(**fields: object) -> Session:
    return _post("openai", COMPLETIONS, {"model": "text", "prompt": "a", "max_tokens": 1} | fields)


_ONE = {
    "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}],
    "parameters": {"binary_data_output": True},
}
_SPACES = gzip.compress(b" " * 60 * MIB)
_CHUNKS = head("POST", "/v2/models/simple/infer", "Transfer-Encoding: chunked") + b"1\r\n \r\n" * 60_000
_OF_FRAMES = (
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
SESSIONS: dict[str, Callable[[], Session]] = {
    **{name: lambda name=name: _frames(name) for name in _OF_FRAMES},  # type: ignore[misc]
    "index": lambda: _calls(INDEX, b"", 200),
    "gzip": lambda: _calls(INFER, gzip.compress(_large(PLAIN_BYTES // 4), 1), 8, ("grpc-encoding", "gzip")),
    "unread answers": lambda: _calls(INFER, _large(1), 500, reads=False),
    "unread small answers": lambda: Session(
        "grpc",
        PREFACE + initial_window(0) + b"".join(map(FLOODS["empty messages"].frames, range(5))),
        None,
        reads=False,
    ),
    "idle gRPC": lambda: Session("grpc", OPENING, None, times=IDLE),
    "idle HTTP": lambda: Session("http", b"", None, times=IDLE),
    "ClientHello gRPC": lambda: _hello("grpc"),
    "ClientHello HTTP": lambda: _hello("http"),
    "pipelined HTTP": lambda: Session("http", request("GET", LIVE) * 1000),
    "chunks": lambda: Session("http", _CHUNKS + b"0\r\n\r\n"),
    "gzip HTTP": lambda: Session(
        "http", request("POST", "/v2/models/simple/infer", _SPACES, "Content-Encoding: gzip")
    ),
    "unread answers HTTP": lambda: _post("http", "/v2/models/large/infer", _ONE, 100, False),
    "index HTTP": lambda: _post("http", "/v2/repository/index", {}, 100),
    "scrapes": lambda: Session("metrics", request("GET", "/metrics") * 100),
    "token ids": lambda: _openai(prompt=[1] * 10_000_000),
    "stops": lambda: _openai(stop=["a"] * 1_000_000),
    "model name": lambda: _openai(model="a" * 60 * MIB),
    "prompts": lambda: _openai(prompt=["a"] * 2048, n=7),
    "answers": lambda: _openai(prompt=["a"] * 16, n=8),
    "patterns": lambda: _openai(model="tiny", structured_outputs={"regex": "(ab{255}){256}"}),
    **{
        f"message of {name}{kind}": lambda make=make, path=path: _body(make, path)  # type: ignore[misc]
        for name, make in infer_bodies("strings", 3 * MIB).items()
        for kind, path in (("", INFER), (", stream", STREAM))
    },
}
QUICK = {
    "empty messages",
    "unknown frames",
    "HEADERS of a closed stream",
    "index",
    "gzip",
    "idle gRPC",
    "idle HTTP",
}
"""The worst of them: ten minutes with 16 connections."""


class _Attack:
    """One connection of the attacker after another."""

    def __init__(self, session: Session, address: tuple[str, int], selector: BaseSelector) -> None:
        self.opened = self.sent = 0
        self._session, self._address, self._selector = session, address, selector
        self._open()

    def _open(self) -> None:
        self.opened += 1
        self._left, self._tail = memoryview(self._session.sent), b""
        self._socket = socket.create_connection(self._address)
        self._socket.setblocking(False)
        self._selector.register(self._socket, EVENT_READ * self._session.reads | EVENT_WRITE, self)

    def on_ready(self, events: int) -> None:
        """Goes on."""
        ended = False
        with suppress(BlockingIOError):
            try:
                ended = bool(events & EVENT_READ) and self._read()
                if events & EVENT_WRITE and not ended:
                    self._write()
            except ConnectionError:
                ended = True
        if ended:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._open()

    def _read(self) -> bool:
        got, end = self._socket.recv(MIB), self._session.end
        found, self._tail = self._tail + got, got[-len(END) :]
        return not got or bool(end and end in found)

    def _write(self) -> None:
        count = self._socket.send(self._left[: MIB // 4])
        self.sent += count
        self._left = self._left[count:]
        if self._left:
            return
        if self._session.end == b"":
            self._left = memoryview(self._session.sent)
        elif self._session.reads:
            self._selector.modify(self._socket, EVENT_READ, self)
        else:
            self._selector.unregister(self._socket)


def attack(pipe: Connection, name: str, addresses: Mapping[str, str], connections: int) -> None:
    """Floods the server until the pipe's other end says so; then sends what it did."""
    os.nice(5)
    session = SESSIONS[name]()
    host, _, port = addresses[session.port].rpartition(":")
    with DefaultSelector() as selector:
        selector.register(pipe, EVENT_READ)
        attacks = [_Attack(session, (host, int(port)), selector) for _ in range(connections * session.times)]
        begin = time.perf_counter()
        pipe.send(None)
        while not pipe.poll():
            for key, events in selector.select():
                if key.data is not None:
                    key.data.on_ready(events)
        took_s = time.perf_counter() - begin
        sent, opened = sum(each.sent for each in attacks), sum(each.opened for each in attacks)
        pipe.send(f"{sent / took_s / 1e6:.1f} | {opened / took_s:.0f}")


def probe(
    pipe: Connection, addresses: Mapping[str, str], root: Path | None, pids: list[int], seconds: float
) -> None:
    """Asks each port in turn; sends the times of its answers, and the server's CPU time meanwhile."""
    trusts = None if root is None else ssl.create_default_context(cafile=root)
    grpc_address = addresses["grpc"].replace("127.0.0.1", "localhost")  # as in its certificate
    if root is None:
        channel = grpc.insecure_channel(grpc_address)
    else:
        channel = grpc.secure_channel(grpc_address, grpc.ssl_channel_credentials(root.read_bytes()))
    health, infer, simple = channel.unary_unary(HEALTH), channel.unary_unary(INFER), simple_request()
    names, numbers = ("INPUT0", "INPUT1"), list(range(16))
    tensors = [json.loads(infer_body(name, "INT32", numbers))["inputs"][0] for name in names]

    def http(port: str, path: str, body: bytes | None = None) -> Http:
        return Http(addresses[port], "GET" if body is None else "POST", path, body, tls=trusts)

    asks: tuple[Callable[[], object], ...] = (
        lambda: health(b""),
        lambda: infer(simple.SerializeToString()),
        http("http", LIVE),
        http("http", "/v2/models/simple/infer", json.dumps({"inputs": tensors}).encode()),
        http("openai", "/v1/models"),
        http("metrics", "/metrics"),
    )
    found: Found = {name: [] for name in PORTS}
    pipe.send(None)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, ask in zip(PORTS, asks, strict=True):
            before, cpu = time.perf_counter(), _cpu_s(pids)
            try:
                ask()
            except (Ended, OSError, HTTPException, grpc.RpcError) as error:
                print(f"{name} failed: {str(error)[:200]!r}")
                if isinstance(ask, Http):
                    ask.close()
            found[name].append((time.perf_counter() - before, _cpu_s(pids) - cpu))
            time.sleep(0.002)
    pipe.send(found)


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # the clock of each process


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process that has said that it is ready."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
    finally:
        process.kill()
        process.join()


def _tree(server: ServerProcess, part: str = "") -> list[psutil.Process]:
    """The server's process and its children with this in their command lines."""
    process = psutil.Process(server.process.pid)
    return [process, *(each for each in process.children(recursive=True) if part in " ".join(each.cmdline()))]


def _resident(server: ServerProcess) -> int:
    """Memory of the server and all it has started, in MB."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for each in _tree(server):
            total += each.memory_info().rss
    return total // MIB


def _delays(server: ServerProcess, root: Path | None, seconds: float) -> tuple[Found, int]:
    """Delays that the prober finds, and the most memory that the server has meanwhile."""
    pids, most = [each.pid for each in _tree(server, FRONT)], 0
    with _process(probe, _addresses(server), root, pids, seconds) as prober:
        while not prober.poll(0.1):
            most = max(most, _resident(server))
        return prober.recv(), most


def _addresses(server: ServerProcess) -> dict[str, str]:
    found = dict(re.findall(r"\| (\w+) +\| (?:https?://)?([^/\s]+)", server.output))
    return {name.lower(): found[name] for name in ("gRPC", "HTTP", "OpenAI", "Metrics")}


def _ms(found: Sequence[float]) -> str:
    taken = sorted(each * 1e3 for each in found)
    return f"{taken[len(taken) // 2]:.1f} / {taken[len(taken) * 99 // 100]:.1f} / {taken[-1]:.1f}"


def _write_models(root: Path) -> None:
    root.mkdir()
    copy_example(root, "simple")
    write_model(root, "strings", STRINGS_CONFIG, {"model.py": STRINGS})
    write_model(root, "large", LARGE_CONFIG, {"model.py": LARGE})
    text_model(root, TEXT, "text")
    random_model(root)
    for number in range(UNLOADED):
        write_model(root, f"unloaded_{number}", 'backend: "python"')


def _row(server: ServerProcess, root: Path | None, name: str, connections: int, seconds: float) -> str:
    alone, before = _delays(server, root, seconds / 6)
    with _process(attack, name, _addresses(server), connections) as attacker:
        found, most = _delays(server, root, seconds)
        attacker.send(None)
        rates = attacker.recv()
    end = time.monotonic() + SETTLED_S
    while (after := _resident(server)) > before + 50 and time.monotonic() < end:
        time.sleep(0.1)
    columns = [_ms([each for port in alone.values() for each, _ in port])]
    columns += [_ms([each for each, _ in port]) for port in found.values()]
    columns += [_ms([each for port in found.values() for _, each in port])]
    return f"{' | '.join(columns)} | {rates} | {before} / {most} / {after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the delays beside each flood."""
    parser = argparse.ArgumentParser(prog="bench.floods")
    parser.add_argument("--only", default="", help="a part of the names of floods; without it no messages")
    parser.add_argument("--quick", action="store_true", help="the worst only, with 16 connections")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long a flood lasts")
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--fronts", type=int, nargs="*", default=[0, 2])
    given = parser.parse_args(arguments)
    names = [each for each in SESSIONS if given.only in each and (given.only or "message of" not in each)]
    if given.quick:
        names, given.connections = [name for name in names if name in QUICK], [16]
    columns = (
        "flood",
        "connections",
        "fronts",
        "alone",
        *PORTS,
        "CPU of the server",
        "MB/s",
        "opened/s",
        "MB",
    )
    print("|", " | ".join(columns), "|\n" + "|---" * len(columns) + "|")
    with tempfile.TemporaryDirectory() as directory:
        models, authority = Path(directory, "models"), Authority(Path(directory, "authority"))
        _write_models(models)
        key, certificate = authority.issue("server")
        for fronts in given.fronts:
            for tls in (False, True):
                chosen = [name for name in names if ("ClientHello" in name) == tls]
                flags = [f"--front-ends={fronts}", *FLAGS, f"--openai-port={free_port()}"]
                flags += [f"--tls-cert={certificate}", f"--tls-key={key}"] if tls else []
                if not chosen:
                    continue
                with serving_process(models, flags=flags) as server:
                    for name in chosen:
                        for count in given.connections:
                            row = _row(server, authority.root if tls else None, name, count, given.seconds)
                            print(f"| {name} | {count} | {fronts} | {row} |", flush=True)


if __name__ == "__main__":
    main()
