"""perf_analyzer's text and CSV, from the results of a run."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

from conch_tools.perf.measure.results import PerfResult, Point, ServerStatistics

_NS_PER_US = 1_000
_PERCENTILES = (50, 90, 95, 99)
# The metrics of a point that have columns in the verbose CSV.
_GPU = {
    "Avg GPU Utilization": "gpu_utilization",
    "Avg GPU Power Usage": "gpu_power",
    "Max GPU Memory Usage": "gpu_memory_used",
    "Total GPU Memory": "gpu_memory_total",
}


def as_text(result: PerfResult, percentile: int | None = None) -> str:
    """The report on standard output; a chosen percentile is listed too."""
    lines = ["*** Measurement Settings ***", f"  Batch size: {result.batch}", ""]
    for point in result.points:
        lines += [_load_line(point), *_client_lines(result, point, percentile), *_server_lines(point), ""]
    if any(point.answered for point in result.points):
        lines.append("Inferences/Second vs. Client Average Batch Latency")
    for point in result.points:
        what = "Concurrency" if point.load.mode == "concurrency" else "Request Rate"
        value = f"{point.load.value:g}" if point.load.mode == "concurrency" else f"{point.load.value:.2f}"
        lines.append(
            f"{what}: {value}, throughput: {_throughput(result, point)}, latency {_mean(point)} usec"
        )
    return "\n".join(lines) + "\n"


def as_csv(result: PerfResult, percentile: int | None = None, *, verbose: bool = False) -> str:
    """The CSV of ``-f``: a line for each point, by throughput; times in µs."""
    return _csv(result, percentile, verbose, lambda point: point.server)


def composing_csv(
    result: PerfResult, percentile: int | None = None, *, verbose: bool = False
) -> dict[str, str]:
    """The CSV of each composing model, by the prefix of its file's name, ``<name>_v<version>``."""
    names = dict.fromkeys(name for point in result.points for name in point.composing)
    found = {}
    for name in names:
        model, _, version = name.rpartition(":")
        text = _csv(result, percentile, verbose, lambda point, name=name: point.composing.get(name))  # type: ignore[misc]
        found[f"{model}_v{version}"] = text
    return found


def _csv(
    result: PerfResult,
    percentile: int | None,
    verbose: bool,
    server_of: Callable[[Point], ServerStatistics | None],
) -> str:
    points = sorted(result.points, key=lambda point: point.achieved_rate)
    decoupled = any(point.responses > point.answered for point in points)
    cached = any(_cached(server_of(point)) for point in points)
    rows = [
        _row(result, point, server_of(point) or ServerStatistics(), percentile, (decoupled, cached, verbose))
        for point in points
    ]
    rate = any(point.load.mode == "rate" for point in points)
    out = io.StringIO()
    head = list(rows[0]) if rows else ["Load"]
    head[0] = "Request Rate" if rate else "Concurrency"
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(row.values() for row in rows)
    return out.getvalue()


def _row(
    result: PerfResult,
    point: Point,
    server: ServerStatistics,
    percentile: int | None,
    columns: tuple[bool, bool, bool],
) -> dict[str, object]:
    decoupled, cached, verbose = columns
    send, receive = point.send_ns, point.receive_ns
    queue, *compute = (
        server.each_ns(part) for part in (server.queue_ns, server.input_ns, server.infer_ns, server.output_ns)
    )
    hit, miss = server.each_ns(server.cache_hit_ns), server.each_ns(server.cache_miss_ns)
    network = point.service.mean_ns - send - receive - queue - sum(compute) - hit - miss
    row: dict[str, object] = {
        "Load": f"{point.load.value:g}",
        "Inferences/Second": _throughput(result, point),
    }
    if decoupled:
        row["Response Throughput"] = f"{point.responses / point.length_s:.4f}" if point.length_s else "0"
    row["Client Send"] = _us(send)
    row["Network+Server Send/Recv"] = _us(max(network, 0.0))
    row["Server Queue"] = _us(queue)
    for name, value in zip(("Input", "Infer", "Output"), compute, strict=True):
        row[f"Server Compute {name}"] = _us(value)
    if cached:
        row["Server Cache Hit"], row["Server Cache Miss"] = _us(hit), _us(miss)
    row["Client Recv"] = _us(receive)
    for number in _percentiles(percentile):
        row[f"p{number} latency"] = _us(point.service.quantile_ns(number / 100))
    if verbose:
        row["Avg latency"] = _mean(point)
        row["request/response"] = _us(send + receive)
        row["response wait"] = _us(max(point.service.mean_ns - send - receive, 0.0))
        row.update(_gpu_cells(point))
    return row


def _gpu_cells(point: Point) -> dict[str, str]:
    # Metrics are named as gpu_power:UUID.
    cells = {}
    for column, name in _GPU.items():
        found = {
            key.partition(":")[2]: value for key, value in point.metrics.items() if key.startswith(f"{name}:")
        }
        cells[column] = "".join(f"{uuid}:{value:g};" for uuid, value in found.items())
    return cells if any(cells.values()) else {}


def _client_lines(result: PerfResult, point: Point, percentile: int | None) -> list[str]:
    lines = [
        "  Client: ",
        f"    Request count: {point.answered}",
        *_sequence_lines(point),
        f"    Throughput: {_throughput(result, point)} infer/sec",
    ]
    if point.failed:
        lines.append(f"    Failed request count: {point.failed}")
    if point.responses > point.answered:
        lines.append(f"    Response Throughput: {point.responses / point.length_s:.4f} infer/sec")
    lines.append(f"    Avg latency: {_mean(point)} usec")
    lines += [
        f"    p{number} latency: {_us(point.service.quantile_ns(number / 100))} usec"
        for number in _percentiles(percentile)
    ]
    send_receive = point.send_ns + point.receive_ns
    if send_receive:
        wait = _us(max(point.service.mean_ns - send_receive, 0.0))
        kind, text = (
            ("HTTP", "send/recv") if "http" in result.protocol else ("gRPC", "(un)marshal request/response")
        )
        parts = f"{text} {_us(send_receive)} usec + response wait {wait} usec"
        lines.append(f"    Avg {kind} time: {_mean(point)} usec ({parts})")
    return lines


def _sequence_lines(point: Point) -> list[str]:
    if not point.sequences or not point.length_s:
        return []
    rate = f"{point.sequences / point.length_s:.4f}".rstrip("0").rstrip(".")
    return [f"    Sequence count: {point.sequences} ({rate} seq/sec)"]


def _server_lines(point: Point) -> list[str]:
    if point.server is None:
        return []
    lines = ["  Server: ", *_statistics_lines(point.server, "    ")]
    if point.composing:
        lines.append("    Composing models: ")
    for name, statistics in point.composing.items():
        model, _, version = name.rpartition(":")
        lines += [f"    {model}, version: {version}", *_statistics_lines(statistics, "        ")]
    return lines


def _statistics_lines(server: ServerStatistics, indent: str) -> list[str]:
    lines = [f"Inference count: {server.inferences}", f"Execution count: {server.executions}"]
    if _cached(server):
        lines += [f"Cache hit count: {server.cache_hits}", f"Cache miss count: {server.cache_misses}"]
    lines.append(f"Successful request count: {server.requests}")
    parts = {
        "queue": server.queue_ns,
        "compute input": server.input_ns,
        "compute infer": server.infer_ns,
        "compute output": server.output_ns,
    }
    if _cached(server):
        parts |= {"cache hit": server.cache_hit_ns, "cache miss": server.cache_miss_ns}
    overhead = max(server.request_ns - sum(parts.values()), 0)
    texts = [
        f"{name} {_us(server.each_ns(part))} usec" for name, part in {"overhead": overhead, **parts}.items()
    ]
    lines.append(f"Avg request latency: {_us(server.each_ns(server.request_ns))} usec ({' + '.join(texts)})")
    return [indent + line for line in lines]


def _load_line(point: Point) -> str:
    if point.load.mode == "concurrency":
        return f"Request concurrency: {point.load.value:g}"
    return f"Request Rate: {point.load.value:g} inference requests per second"


def _percentiles(chosen: int | None) -> list[int]:
    return sorted({*_PERCENTILES, *([] if chosen is None else [chosen])})


def _cached(server: ServerStatistics | None) -> bool:
    return server is not None and bool(server.cache_hits or server.cache_misses)


def _throughput(result: PerfResult, point: Point) -> str:
    return f"{point.achieved_rate * result.batch:.4f}".rstrip("0").rstrip(".")


def _mean(point: Point) -> int:
    return _us(point.service.mean_ns)


def _us(ns: float) -> int:
    return int(ns / _NS_PER_US)
