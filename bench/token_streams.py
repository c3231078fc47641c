"""Streams of tokens: `python -m bench.token_streams`, see bench/README.md.

A model that stands for an engine with continuous batching sends a token to all running streams in each step,
at once or every 5 ms. The load opens streams and keeps them open, one after the other on each connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from bench import facts
from bench.servers import (
    REPOSITORIES,
    Command,
    Ports,
    Server,
    conch_command,
    triton_command,
)

REPOSITORY = (REPOSITORIES / "tokens",)
CASES = {
    "flood 1": ("tokens_flood", 1),
    "flood 8": ("tokens_flood", 8),
    "flood 32": ("tokens_flood", 32),
    "paced 8": ("tokens_5ms", 8),
    "paced 32": ("tokens_5ms", 32),
    "paced 64": ("tokens_5ms", 64),
    "vllm 1": ("tiny", 1),
    "vllm 8": ("tiny", 8),
    "vllm 32": ("tiny", 32),
}
OF_VLLM = "vllm"
"""The first word of cases that ask vLLM: its own server, and conch with the same engine."""
_START_S = 300.0
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE = {"enforce_eager": True, "max_model_len": 2048, "dtype": "float32"}
HEADER = (
    "| case | server | tokens/s | CPU µs/token: server | model's process "
    "| first token p50 / p99 ms | gap p50 / p99 ms |\n" + "|---" * 7 + "|"
)


@dataclass
class Figures:
    """What one load saw."""

    tokens: int = 0
    seconds: float = 0.0
    server_s: float = 0.0
    model_s: float = 0.0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One connection: sends requests one after the other, and notes when tokens come."""

    def __init__(self, request: bytes, figures: Figures, until: float) -> None:
        self._request = request
        self._figures = figures
        self._until = until
        self._began = self._last = 0.0
        self._text = b""
        self._events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._began, self._last, self._text, self._events = time.perf_counter(), 0.0, b"", 0
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts events."""
        now = time.perf_counter()
        if not self._text and not data.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(data[:500].decode(errors="replace")))
            self._transport.abort()
            return
        self._text = (self._text + data)[-4096:]
        count = data.count(b"data: {")
        if count:
            if self._last:
                self._figures.gaps += [now - self._last, *[0.0] * (count - 1)]
            else:
                self._figures.firsts.append(now - self._began)
            self._last = now
            self._events += count
        if self._text.endswith(b"\r\n0\r\n\r\n"):
            # An event has several tokens where the client or the server is behind.
            counted = _USAGE.findall(self._text)
            self._figures.tokens += int(counted[-1]) if counted else self._events
            if now < self._until:
                self._send()
            else:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the stream."""
        if not self.ended.done():
            self.ended.set_result(None)


def request_of(server: Target, model: str, tokens: int, address: str) -> bytes:
    """The request of one stream."""
    if server.openai:
        path = "/v1/completions"
        body = {"model": model, "prompt": "Say it.", "max_tokens": tokens, "stream": True}
        if server.vllm:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    else:
        path = f"/v2/models/{model}/generate_stream"
        body = {"text_input": "Say it.", "max_tokens": tokens}
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()


@dataclass
class Target:
    """A server, whether its OpenAI routes are asked, and whether it has vLLM's engine."""

    name: str
    server: Server
    openai: bool = False
    vllm: bool = False


async def load(target: Target, model: str, streams: int, tokens: int, seconds: float) -> Figures:
    """Runs streams against one server."""
    figures = Figures()
    host, _, port = target.server.http.partition(":")
    assert target.server.pid is not None
    main = psutil.Process(target.server.pid)
    request = request_of(target, model, tokens, target.server.http)
    loop = asyncio.get_running_loop()
    whole, own = target.server.cpu_seconds(), sum(main.cpu_times()[:2])
    begin = time.perf_counter()
    opened = [
        await loop.create_connection(lambda: Stream(request, figures, begin + seconds), host, int(port))
        for _ in range(streams)
    ]
    await asyncio.gather(*(stream.ended for _, stream in opened))
    figures.seconds = time.perf_counter() - begin
    figures.server_s = sum(main.cpu_times()[:2]) - own
    figures.model_s = target.server.cpu_seconds() - whole - figures.server_s
    return figures


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile, in milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def row(case: str, name: str, rounds: Sequence[Figures]) -> str:
    """A line of the table: medians over the rounds."""

    def middle(measure: Callable[[Figures], float]) -> float:
        return median(measure(each) for each in rounds)

    rates = [each.tokens / each.seconds for each in rounds]
    return (
        f"| {case} | {name} | {median(rates):,.0f} [{min(rates):,.0f}-{max(rates):,.0f}] "
        f"| {middle(lambda each: 1e6 * each.server_s / each.tokens):.1f} "
        f"| {middle(lambda each: 1e6 * each.model_s / each.tokens):.1f} "
        f"| {middle(lambda each: percentile(each.firsts, 0.5)):.1f} / "
        f"{middle(lambda each: percentile(each.firsts, 0.99)):.1f} "
        f"| {middle(lambda each: percentile(each.gaps, 0.5)):.1f} / "
        f"{middle(lambda each: percentile(each.gaps, 0.99)):.1f} |"
    )


def other_checkout(checkout: Path) -> Callable[[Ports], Command]:
    """Another checkout's code in this environment."""

    def command(ports: Ports) -> Command:
        flags = conch_command(ports, REPOSITORY).arguments[1:]
        start = "import sys; from conch.cli import main; sys.exit(main())"
        paths = os.pathsep.join(str(checkout.resolve() / folder) for folder in ("services", "control"))
        return Command([sys.executable, "-c", start, *flags], {"PYTHONPATH": paths})

    return command


def vllm_command(python: Path, weights: Path) -> Callable[[Ports], Command]:
    """The server that vLLM brings."""

    def command(ports: Ports) -> Command:
        flags = ["--model", str(weights), "--served-model-name=tiny", f"--port={ports.http}"]
        engine = ["--enforce-eager", f"--max-model-len={ENGINE['max_model_len']}", "--dtype=float32"]
        module = ["-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
        quiet = ["--disable-uvicorn-access-log"]
        return Command([str(python), *module, *flags, *engine, *quiet], VARIABLES)

    return command


def vllm_repository(root: Path, python: Path, weights: Path) -> Path:
    """A repository with the same engine."""
    version = root / "tiny" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": str(weights), **ENGINE}))
    parameters = {f"CONCH_ENV_{name}": value for name, value in VARIABLES.items()}
    parameters["EXECUTION_ENV_PATH"] = str(python.parent.parent)
    lines = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        for name, value in parameters.items()
    ]
    (root / "tiny" / "config.pbtxt").write_text("\n".join(['backend: "vllm"', *lines]))
    return root


def open_targets(stack: ExitStack, chosen: argparse.Namespace, cases: Sequence[str]) -> list[Target]:
    """Starts the servers that the cases need."""
    targets: list[Target] = []
    wanted = chosen.servers.split(",")

    def add(name: str, command: Callable[[Ports], Command], vllm: bool = False) -> Server:
        server = Server(f"tokens-{name.replace(' ', '-').replace(',', '')}", command)
        stack.callback(server.stop)
        if name == OF_VLLM:
            server.launch()
        else:
            server.start(_START_S)
        server.wait_for_http(_START_S)
        targets.append(Target(name, server, vllm, vllm))
        return server

    if any(case.startswith(OF_VLLM) for case in cases):
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conch-bench-")))
        weights = chosen.weights.resolve()
        repository = vllm_repository(root, chosen.vllm, weights)
        add(OF_VLLM, vllm_command(chosen.vllm, weights), True)
        add("conch, vllm", lambda ports: conch_command(ports, (repository,)), True)
    if all(case.startswith(OF_VLLM) for case in cases):
        return targets
    if "conch" in wanted or "openai" in wanted:
        server = add("conch", lambda ports: conch_command(ports, REPOSITORY))
        if "openai" in wanted:
            targets.append(Target("conch, /v1", server, openai=True))
        if "conch" not in wanted:
            targets.remove(Target("conch", server))
    if chosen.baseline is not None:
        add("baseline", other_checkout(chosen.baseline))
    if "triton" in wanted:
        add("triton", lambda ports: triton_command(ports, REPOSITORY))
    return targets


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.token_streams", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cases",
        default=",".join(case for case in CASES if not case.startswith(OF_VLLM)),
        help="%(default)s",
    )
    parser.add_argument("--servers", default="conch,openai,triton", help="%(default)s")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM, for its cases")
    parser.add_argument("--weights", type=Path, help="folder of a model for vLLM")
    parser.add_argument("--baseline", type=Path, help="another checkout, as a further server")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--seconds", type=float, default=4, help="length of each load (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream (%(default)s)")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    cases = chosen.cases.split(",")
    if any(case.startswith(OF_VLLM) for case in cases) and (chosen.vllm is None or chosen.weights is None):
        parser.error("cases of vLLM need --vllm and --weights")
    with ExitStack() as stack:
        targets = open_targets(stack, chosen, cases)
        print("; ".join(f"{name} {value}" for name, value in facts.machine().items()), end="\n\n")
        print(HEADER)
        for case in cases:
            model, streams = CASES[case]
            asked = [target for target in targets if target.vllm == case.startswith(OF_VLLM)]
            rounds: dict[str, list[Figures]] = {target.name: [] for target in asked}
            for number in range(chosen.rounds + 1):
                for target in asked:
                    seconds = chosen.seconds if number else 0.5
                    found = asyncio.run(load(target, model, streams, chosen.tokens, seconds))
                    if number:  # the first is a warm-up
                        rounds[target.name].append(found)
            for target in asked:
                print(row(case, target.name, rounds[target.name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
