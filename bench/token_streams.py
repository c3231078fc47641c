"""Streams of tokens: `python -m bench.token_streams`, see bench/README.md.

A model that stands for an engine with continuous batching sends a token to all running streams in each step,
at once or every 5 ms. The load has streams one after the other on each connection.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from bench import facts
from bench.perf import measure_point
from bench.servers import (
    REPOSITORIES,
    BenchServer,
    Command,
    Ports,
    conch_command,
    triton_command,
)
from conch_tools.connection import parse_url
from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.results import Load, Point
from conch_tools.perf.perf_settings import PerfSettings

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
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE = {"enforce_eager": True, "max_model_len": 2048, "dtype": "float32"}
HEADER = (
    "| case | server | tokens/s | CPU µs/token: server | model's process "
    "| first token p50 / p99 ms | gap p50 / p99 ms |\n" + "|---" * 7 + "|"
)


@dataclass
class Target:
    """A server; `openai` for requests to its OpenAI routes, `vllm` if it has vLLM's engine."""

    name: str
    server: BenchServer
    openai: bool = False
    vllm: bool = False


@dataclass
class Figures:
    """Figures of one load."""

    point: Point
    tokens: float
    server_s: float
    model_s: float


def load(target: Target, model: str, streams: int, tokens: int, seconds: int) -> Figures:
    """Runs streams against one server."""
    assert target.server.pid is not None
    main = psutil.Process(target.server.pid)
    body: dict[str, object] = {"max_tokens": tokens}
    if target.openai:
        path = "v1/completions"
        body |= {"model": model, "prompt": "Say it.", "stream": True}
        if target.vllm:
            body["ignore_eos"] = True
    else:
        path = f"v2/models/{model}/generate_stream"
        body["text_input"] = "Say it."
    with tempfile.TemporaryDirectory(prefix="conch-bench-") as folder:
        data = Path(folder, "payload.json")
        data.write_text(json.dumps({"data": [{"payload": [body]}]}))
        settings = PerfSettings(
            parse_url(f"http://{target.server.http}"),
            model,
            loads=[Load("concurrency", streams)],
            seconds=seconds,
            warm_up=0,
            data=[data],
            path=path,
            processes=1,
        )
        whole, own = target.server.cpu_seconds(), sum(main.cpu_times()[:2])
        point = measure_point(settings)
    server_s = sum(main.cpu_times()[:2]) - own
    # Those of streams without an end count, too. An event has several tokens where one side is behind.
    events = point.first.count + point.between.count
    seen = events * point.answered * tokens / point.responses
    return Figures(point, seen, server_s, target.server.cpu_seconds() - whole - server_s)


def row(case: str, name: str, rounds: Sequence[Figures]) -> str:
    """A line of the table: medians over the rounds."""

    def middle(measure: Callable[[Figures], float]) -> float:
        return median(measure(each) for each in rounds)

    def percentile(times: Histogram, share: float) -> float:
        return times.quantile_ns(share) / 1e6

    rates = [each.tokens / each.point.length_s for each in rounds]
    return (
        f"| {case} | {name} | {median(rates):,.0f} [{min(rates):,.0f}-{max(rates):,.0f}] "
        f"| {middle(lambda each: 1e6 * each.server_s / each.tokens):.1f} "
        f"| {middle(lambda each: 1e6 * each.model_s / each.tokens):.1f} "
        f"| {middle(lambda each: percentile(each.point.first, 0.5)):.1f} / "
        f"{middle(lambda each: percentile(each.point.first, 0.99)):.1f} "
        f"| {middle(lambda each: percentile(each.point.between, 0.5)):.1f} / "
        f"{middle(lambda each: percentile(each.point.between, 0.99)):.1f} |"
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

    def add(name: str, command: Callable[[Ports], Command], vllm: bool = False) -> BenchServer:
        server = BenchServer(f"tokens-{name.replace(' ', '-').replace(',', '')}", command)
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
    parser.add_argument("--seconds", type=int, default=4, help="length of each load (%(default)s)")
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
                    seconds = chosen.seconds if number else 1
                    found = load(target, model, streams, chosen.tokens, seconds)
                    if number:  # the first is a warm-up
                        rounds[target.name].append(found)
            for target in asked:
                print(row(case, target.name, rounds[target.name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
