"""The runner: `python -m bench.run`, see bench/README.md."""

from __future__ import annotations

import argparse
import datetime
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from bench import facts, perf_analyzer
from bench.measurement import STABILITY_PERCENT, WINDOWS, Measurement, MeasurementError, UnstableError
from bench.perf import measure
from bench.report import SceneResult, markdown, text_table
from bench.scenes import SERVERS, Contestant, choose_scenes, load_scenes
from bench.servers import (
    ROOT,
    BenchServer,
    ServerError,
    baseline_command,
    conch_command,
    echo_command,
    triton_command,
)

RESULTS = Path(__file__).with_name("results")


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen scenes, print their tables and write the results file."""
    options = _parser().parse_args(arguments)
    try:
        scenes = choose_scenes(options.scenes, load_scenes())
        names = _server_names(options.servers, options.baseline)
        planned = [(scene, chosen) for scene in scenes if (chosen := scene.only(names))]
        if not planned:
            raise ValueError("none of the chosen servers takes part in the chosen scenes")
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    # SIGTERM unwinds like Ctrl-C, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = {**facts.machine(), **facts.versions()}
    results: list[SceneResult] = []
    with ExitStack() as stack:
        try:
            if any(scene.generator == "perf_analyzer" for scene, _ in planned):
                known["perf_analyzer"] = perf_analyzer.version()
            servers = _start(stack, sorted({one.server for _, chosen in planned for one in chosen}), options)
        except (ServerError, MeasurementError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        for name, server in servers.items():
            checkout = {"conch": ROOT, "baseline": options.baseline}.get(name)
            at = f" at {facts.revision(checkout)}" if checkout else ""
            known[f"server: {name}"] = server.version + at
        try:
            for scene, chosen in planned:
                results.append(SceneResult(scene, chosen))
                _run_scene(results[-1], servers, options.repeats, options.scale)
                print(f"\n{text_table(results[-1])}\n", flush=True)
        finally:
            # What was measured before an interruption is kept: some scenes take minutes.
            if results:
                known["rounds per scene"] = str(options.repeats)
                _write(options.out, options.topic, markdown(options.topic, known, method(), results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--scenes", default="all", help='names from scenes.toml with commas, or "all"')
    parser.add_argument("--servers", default="conch,triton,echo", help="who takes part (%(default)s)")
    parser.add_argument("--repeats", type=_positive, default=3, help="rounds per scene (%(default)s)")
    parser.add_argument("--topic", default="run", help="what the results file is named after")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results file")
    parser.add_argument("--baseline", type=Path, help="another checkout of conch to measure beside this one")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor on request counts; below 1 for smoke runs (%(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _server_names(text: str, baseline: Path | None) -> frozenset[str]:
    names = {name.strip() for name in text.split(",") if name.strip()}
    unknown = names - set(SERVERS)
    if unknown:
        raise ValueError(f"unknown server {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}")
    if "baseline" in names and baseline is None:
        raise ValueError("the server baseline needs --baseline CHECKOUT")
    return frozenset(names | {"baseline"} if baseline else names)


def _start(stack: ExitStack, names: list[str], options: argparse.Namespace) -> dict[str, BenchServer]:
    """Start every server of the run; only one is under load at a time, the others wait beside it."""
    commands = {"conch": conch_command, "triton": triton_command, "echo": echo_command}
    servers: dict[str, BenchServer] = {}
    for name in names:
        command = baseline_command(options.baseline) if name == "baseline" else commands[name]
        servers[name] = BenchServer(name, command)
        stack.callback(servers[name].stop)
        servers[name].start()
        print(f"started {name}: {servers[name].version}", flush=True)
    return servers


def _run_scene(result: SceneResult, servers: dict[str, BenchServer], repeats: int, scale: float) -> None:
    """Warms all contestants up, then measures in rounds: A B C, A B C, ... so that drift meets all alike."""
    requests = max(int(result.scene.requests * scale), 10)
    out: set[Contestant] = set()
    for number in range(repeats + 1):
        for contestant in result.contestants:
            one: Measurement | None = None
            if contestant not in out:
                try:
                    one = _run_once(result, contestant, servers[contestant.server], number, requests)
                except (MeasurementError, ServerError):
                    out.add(contestant)
            if number:
                result.add(contestant, one)


def _run_once(
    result: SceneResult, contestant: Contestant, server: BenchServer, number: int, requests: int
) -> Measurement | None:
    """One turn of one contestant; round 0 is the warm-up, whose figures are dropped.

    Raises:
        MeasurementError: the contestant is out of the scene; noted in the result, and its server is stopped.
        ServerError: the same, because its server could not be started again.
    """
    where = f"round {number}" if number else "the warm-up"
    label = f"{result.scene.name} {where} {contestant.label(result.scene.model)}"
    try:
        if not server.running():
            server.restart()
        one = measure(result.scene, contestant.model, server, requests if number else max(requests // 10, 10))
    except UnstableError as error:
        if number:
            result.remark(contestant, f"unstable in {where}")
            print(f"  {label}: {error}", flush=True)
        return None
    except (MeasurementError, ServerError) as error:
        remark = _after_failure(server, error)
        result.remark(contestant, f"{remark} in {where}")
        print(f"  {label}: {remark}", flush=True)
        raise
    if number:
        latency = f"p50 {one.p50:,.0f} µs, p99 {one.p99:,.0f} µs"
        print(f"  {label}: {one.throughput:,.0f}/s, {latency}, CPU {one.cpu_per_request:,.0f} µs", flush=True)
    return one


def _after_failure(server: BenchServer, error: Exception) -> str:
    """Words for what happened; the server is left stopped, to be started when it is next needed."""
    ended = None if isinstance(error, ServerError) else server.how_it_ended()
    remark = ended or _one_line(error)
    # One that lives but failed a measurement may still hold its requests: the next scene gets a fresh one.
    server.stop()
    return remark


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).replace("|", "/")[:200]


def method() -> str:
    """Paragraph of the results file on the method of measurement."""
    return (
        "All servers run side by side on this machine, together with the load generator; one at a time is "
        "under load, the others are idle. Each scene begins with an unrecorded warm-up of every contestant; "
        "then the contestants take turns, round by round. One measurement is one load of `conch perf`, or of "
        f"perf_analyzer where the scene says so, over loopback ({WINDOWS} count windows within "
        f"{STABILITY_PERCENT} %). Figures are medians over "
        "the rounds, with the smallest and largest in brackets. Ratios are medians of the ratios within each "
        "round. CPU per request is user and system time of the server's processes, children included, over "
        "the requests that ModelStatistics counts as successful in the same span; a CPU ratio below 1 means "
        "less CPU than the reference. Absolute figures hold for this machine and this run only."
    )


def _write(folder: Path, topic: str, text: str) -> None:
    """Write the results beside earlier ones of the same day and topic, never over them."""
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", topic.lower()).strip("-") or "run"
    stem = f"{datetime.date.today().isoformat()}-{slug}"
    path, number = folder / f"{stem}.md", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.md"
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
