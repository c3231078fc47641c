"""Trace files are read, those of Triton too; stages, statistics, waterfalls, and Triton's own summary."""

from __future__ import annotations

import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support.tracing import TraceMaker, setting_of, tensor, triton_summary
from tests.support.waiting import PATIENCE_S

from conch.observability.exporters import DropCounter
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_file import TraceFile
from conch.observability.tracing.trace_reader import ReadTrace, TraceFileError, read_traces
from conch.observability.tracing.trace_settings import TraceSetting
from conch.observability.tracing.trace_summary import slowest, stages, summarize
from conch.observability.tracing.waterfall import as_svg, as_text, title, waterfall

STAMP = '{"id":1,"timestamps":[{"name":"REQUEST_START","ns":5}]}'


def written(path: Path, roots: list[Trace]) -> Path:
    """The file of traces."""
    file = TraceFile(DropCounter())
    file.write(roots)
    file.close(time.monotonic() + PATIENCE_S)
    return path


def ensemble(maker: TraceMaker, setting: TraceSetting, protocol: str) -> Trace:
    """A request of 210 ns for an ensemble of two steps that overlap by 20 ns."""
    root = maker.bare(setting, None, "ensemble", protocol)
    root.received_ns, root.read_ns, root.started_ns, root.queued_ns = 1000, 1010, 1020, 1030
    root.ended_ns, root.sends = 1180, [1190, 1210]
    maker.child(root, "first", 1040)
    nested = maker.child(root, "second", 1080)
    maker.child(nested, "called", 1090)
    return root


def test_the_rules_of_tritons_summary_hold(tmp_path: Path) -> None:
    setting, maker = setting_of(file=str(tmp_path / "t")), TraceMaker()
    roots = [maker.root(setting, protocol=protocol) for protocol in ("http", "grpc", "direct")]
    roots += [ensemble(maker, setting, "http"), maker.root(setting, start=5000)]
    records = json.loads(written(tmp_path / "t", roots).read_text())
    core = {"request": 60, "queue": 10, "compute": 30, "input": 10, "infer": 10, "output": 10}
    simple = {**core, "receive": 10, "send": 10, "total": 100}
    http = triton_summary(records, "HTTP")
    assert http[("simple", 1)] == {name: [ns, ns] for name, ns in simple.items()}
    assert http[("ensemble", 1)] == {"request": [160], "receive": [10], "send": [20], "total": [210]}
    for step in ("first", "second", "called"):
        assert http[(step, 1)] == {name: [ns] for name, ns in core.items()}
    assert triton_summary(records, "GRPC") == {("simple", 1): {name: [ns] for name, ns in simple.items()}}


def test_stages_add_up_to_the_request(tmp_path: Path) -> None:
    setting, maker = setting_of(file=str(tmp_path / "t")), TraceMaker()
    roots = [maker.root(setting), maker.root(setting, protocol="grpc"), ensemble(maker, setting, "http")]
    http, grpc, parent, *_ = read_traces(written(tmp_path / "t", roots))
    core = {"request": 60, "queue": 10, "input": 10, "infer": 10, "output": 10, "overhead": 20}
    assert stages(http) == {**core, "total": 100, "receive": 10, "send": 10, "front end": 20}
    # The server may have waited long before a gRPC message came.
    assert stages(grpc) == {**core, "total": 90, "send": 10, "front end": 20}
    assert stages(parent) == {
        "total": 210,
        "receive": 10,
        "request": 160,
        "steps": 100,
        "overhead": 60,
        "front end": 20,
        "send": 20,
    }


def test_statistics_and_the_slowest() -> None:
    traces = [
        ReadTrace("t", number, "m", 1, "", None, [("REQUEST_START", 10), ("REQUEST_END", 10 + number)])
        for number in range(1, 201)
    ]
    found = summarize([*traces, ReadTrace("t", 201)])[("m", 1)]["request"]
    assert (found.count, found.mean, found.p50, found.p99, found.max) == (200, 100.5, 100, 198, 200)
    assert [trace.number for trace, _ in slowest(traces, 3)] == [200, 199, 198]


def test_files_of_triton_that_are_not_json_are_mended(tmp_path: Path) -> None:
    header = '{"id":1,"model_name":"m","model_version":3,"request_id":"a"b\\"}'
    child = '{"id":2,"model_name":"n","model_version":1,"request_id":"","x","parent_id":1}'
    head = b'{"id":1,"activity":"TENSOR_QUEUE_INPUT","tensor":{"name":"IN","data":"'
    tail = b'","shape":"2","dtype":"INT8"}}'
    tensors = [head + data + tail for data in (b'\x01,"', b"\xff,\\", b'\\"a"b\\"')]
    path = tmp_path / "t"
    path.write_bytes(b"[" + b",".join([header.encode(), *tensors, STAMP.encode(), child.encode()]) + b"]\n")
    first, second = read_traces(path)
    assert (first.model, first.version, first.request_id) == ("m", 3, 'a"b\\')
    assert first.stamps == [("REQUEST_START", 5)]
    assert (second.request_id, second.parent) == ('","x', first)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ": No such file or directory"),
        ("", ":1:1: not a trace file: Expecting value"),
        ("{}", ":1:1: not a trace file: expected a list of records"),
        ("[\n nonsense]", ":2:2: not a trace file: Expecting value"),
        (f"[{STAMP},{STAMP[:-9]}]", ':1:58: a broken record: "{\\"id\\":1,\\"timestamps'),
        (f"[{STAMP}", ":1:57: the file is cut off: expected ]"),
        (f"[{STAMP},5]", ": record 1: not a record of a trace: 5"),
        ('[{"id":1,"timestamps":[{"name":"x"}]}]', ": record 0: not a record of a trace: "),
        ('[{"name":"B","ph":"X"}]', ": record 0: not a record of a trace: "),
    ],
)
def test_errors_name_file_and_position(content: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TraceFileError) as caught:
        read_traces(path)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_a_waterfall_shows_the_tree_in_the_order_of_time(tmp_path: Path) -> None:
    setting, maker = setting_of(file=str(tmp_path / "t"), tensors=True), TraceMaker()
    root = ensemble(maker, setting, "http")
    root.request_id = "<\x1b"
    root.tensors = [tensor("in", "IN", "INT32", (1,), b"\1\0\0\0")]
    parent = read_traces(written(tmp_path / "t", [root]))[0]
    rows = waterfall(parent)
    assert [(row.depth, row.label, row.start_ns, row.duration_ns) for row in rows if not row.stage] == [
        (0, "ensemble (1)", 0, 210),
        (1, "first (1)", 40, 60),
        (1, "second (1)", 80, 60),
        (2, "called (1)", 90, 60),
    ]
    assert [row.label for row in rows[:7]] == [
        "ensemble (1)",
        "receive",
        "first (1)",
        "queue",
        "input",
        "infer",
        "output",
    ]
    assert title(parent) == "trace 1 of ensemble (1), request id <?"
    lines = as_text(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert len({line.index("|") for line in lines[1:]}) == 1
    assert lines[1].endswith(f"|{'=' * 50}|         0.0          0.2")
    picture = ElementTree.fromstring(as_svg(rows, title(parent)))
    assert len(picture.findall("{*}rect")) == len(rows) + 1
