"""`TraceFile`: records, rotation, and disks that take nothing."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tracing import TraceMaker, setting_of, tensor, triton_summary
from tests.support.waiting import PATIENCE_S

from conch.core.request import RunTimes
from conch.core.tensor import encode_bytes
from conch.observability.exporters import DropCounter
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_file import TraceFile
from conch.observability.tracing.trace_records import tree_text
from conch.observability.tracing.trace_settings import TraceSetting


def records_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text()))


def ids_in(directory: Path) -> dict[str, int]:
    """Number of traces in each file of a directory."""
    return {
        path.name: len({record["id"] for record in records_of(path)}) for path in sorted(directory.iterdir())
    }


def names_of(text: str) -> list[str]:
    return [
        record["timestamps"][0]["name"] if "timestamps" in record else record.get("activity", "header")
        for record in json.loads(f"[{text}]")
    ]


def sampled(setting: TraceSetting, maker: TraceMaker, number: int) -> list[Trace]:
    """Traces of a setting, which counts them."""
    made = []
    for _ in range(number):
        assert setting.sample()
        made.append(maker.root(setting))
    return made


def test_a_request_has_the_records_of_triton() -> None:
    maker = TraceMaker()
    root = maker.root(setting_of(tensors=True))
    root.request_id = 'a"b'
    root.tensors = [tensor("in", "IN", "FP32", (1, 2), np.array([0.123456789, 2], "<f4").tobytes())]
    step = maker.child(root)
    step.side = 8, "sticky", 3
    text = tree_text(root)
    assert names_of(text)[:15] == [
        "header",
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "REQUEST_START",
        "QUEUE_START",
        "TENSOR_QUEUE_INPUT",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
        "HTTP_SEND_START",
        "HTTP_SEND_END",
        "header",
    ]
    assert text.startswith('{"id":1,"model_name":"simple","model_version":1,"request_id":"a\\"b"},')
    assert '{"id":1,"timestamps":[{"name":"HTTP_RECV_START","ns":1000}]},' in text
    assert (
        '{"id":1,"activity":"TENSOR_QUEUE_INPUT",'
        '"tensor":{"name":"IN","data":"0.123457,2","shape":"1,2","dtype":"FP32"}},' in text
    )
    head = f'{{"id":{step.number},"model_name":"step","model_version":1,"parent_id":1'
    assert f'{head},"conch.route.by":"sticky","conch.rollout.id":3}},' in text


def test_levels_choose_the_records() -> None:
    for timestamps, tensors, expected in ((True, False, 13), (False, True, 1), (False, False, 0)):
        root = TraceMaker().root(setting_of(timestamps=timestamps, tensors=tensors))
        root.tensors = [tensor("out", "OUT", "INT32", (1,), b"\1\0\0\0")]
        assert len(json.loads(f"[{tree_text(root)}]")) == expected


@pytest.mark.parametrize(
    ("datatype", "data", "expected"),
    [
        ("BOOL", b"\0\1\xff", "0,1,1"),
        ("INT8", b"\x22\xff", "34,-1"),
        ("UINT8", b"\x22\xff", "34,255"),
        ("UINT64", b"\xff" * 8, "18446744073709551615"),
        ("FP64", np.array([1e6, 1234567, 1e-5, np.inf, np.nan, -0.0]), "1e+06,1.23457e+06,1e-05,inf,nan,-0"),
        ("FP16", b"\0\0", ""),
        ("BF16", b"\0\0", ""),
        ("BYTES", encode_bytes([b"a,b", b'say "hi"', b"\xff\n", b""]), '"a,b","say ""hi""","\\xff\n",""'),
        ("INT32", b"\0\0\0", ""),
        ("BYTES", b"\1\0\0\0", ""),
        ("INT32", b"", ""),
    ],
)
def test_tensors_are_text_as_c_plus_plus_writes_it(datatype: str, data: Any, expected: str) -> None:
    root = TraceMaker().root(setting_of(timestamps=False, tensors=True))
    root.tensors = [tensor("in", "IN", datatype, (1,), bytes(data))]
    assert json.loads(tree_text(root))["tensor"]["data"] == expected


TIMES = st.integers(0, 30)
PROTOCOLS = st.sampled_from(["http", "grpc", "grpc-stream", "direct"])


@st.composite
def trees(draw: st.DrawFn, maker: TraceMaker, setting: TraceSetting) -> Trace:
    """Requests of any kind: refused, cancelled, decoupled, nested, with times that are missing or odd."""

    def fill(trace: Trace, depth: int) -> Trace:
        trace.model = draw(st.sampled_from(["a", 'b"']))
        trace.request_id = draw(st.text(max_size=3))
        trace.started_ns, trace.queued_ns, trace.ended_ns = draw(st.tuples(TIMES, TIMES, TIMES))
        trace.responded_ns = draw(TIMES)
        trace.cancelled = draw(st.booleans())
        if draw(st.booleans()):
            trace.times = RunTimes(1, draw(TIMES))
            trace.times.input_end_ns, trace.times.output_start_ns = draw(TIMES), draw(TIMES)
            trace.times.end_ns = draw(TIMES)
        for _ in range(draw(st.integers(0, 2)) if depth else 0):
            fill(maker.bare(setting, trace, "", "model-call"), depth - 1)
        return trace

    root = fill(maker.bare(setting, None, "", draw(PROTOCOLS)), 2)
    root.received_ns, root.read_ns = draw(st.tuples(TIMES, TIMES))
    root.sends = draw(st.lists(TIMES, max_size=5))
    return root


@given(data=st.data())
def test_a_file_is_valid_after_each_write(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    path.write_text("left by an earlier server")
    maker, setting = TraceMaker(), setting_of(file=str(path))
    file, written = TraceFile(DropCounter()), 0
    for _ in range(data.draw(st.integers(1, 3))):
        roots = data.draw(st.lists(trees(maker, setting), min_size=1, max_size=3))
        file.write(roots)
        records = records_of(path)
        numbers = [number for number, _ in groupby(record["id"] for record in records)]
        assert len(numbers) == len(set(numbers)), "records of a trace are not contiguous"
        parents = {record["id"]: record.get("parent_id") for record in records if "model_name" in record}
        assert [number for number in numbers if parents[number] is None][written:] == [
            root.number for root in roots
        ]
        written += len(roots)
        for number, parent in parents.items():
            assert parent is None or parent < number
        for _, group in groupby(records, key=lambda record: record["id"]):
            header, *stamps = group
            assert "model_name" in header
            times = [stamp["timestamps"][0]["ns"] for stamp in stamps]
            assert times == sorted(times)
        for front_end in ("HTTP", "GRPC"):
            triton_summary(records, front_end)
    file.close(time.monotonic() + PATIENCE_S)


@pytest.mark.parametrize(
    ("values", "writes", "open_files", "closed_files"),
    [
        ({}, [1, 2], {"t": 3}, {"t": 3}),
        ({"log_frequency": 2}, [1], {}, {"t.0": 1}),
        ({"log_frequency": 2}, [1, 4], {"t.0": 2, "t.1": 2}, {"t.0": 2, "t.1": 2, "t.2": 1}),
        ({"count": 5}, [2, 3], {"t.0": 5}, {"t.0": 5}),
        ({"count": 5, "log_frequency": 3}, [5], {"t.0": 3, "t.1": 2}, {"t.0": 3, "t.1": 2}),
        ({"count": 5, "log_frequency": 3}, [4], {"t.0": 3}, {"t.0": 3, "t.1": 1}),
    ],
)
@pytest.mark.parametrize("end", ["replaced", "close"])
def test_files_are_changed_by_the_log_frequency(
    values: dict[str, int],
    writes: list[int],
    open_files: dict[str, int],
    closed_files: dict[str, int],
    end: str,
    tmp_path: Path,
) -> None:
    setting, maker = setting_of(file=str(tmp_path / "t"), **values), TraceMaker()
    file = TraceFile(DropCounter())
    for number in writes:
        file.write(sampled(setting, maker, number))
    assert ids_in(tmp_path) == open_files
    if end == "replaced":
        file.replaced(setting)
    else:
        file.close(time.monotonic() + PATIENCE_S)
    assert ids_in(tmp_path) == closed_files


def test_settings_share_files_and_indices(tmp_path: Path) -> None:
    path, maker = str(tmp_path / "t"), TraceMaker()
    first = setting_of(file=path, log_frequency=10)
    second = setting_of(file=path, count=5)
    third = setting_of(file=path)
    file = TraceFile(DropCounter())
    file.write([*sampled(third, maker, 2), *sampled(first, maker, 2), *sampled(third, maker, 1)])
    file.replaced(first)
    file.write(sampled(second, maker, 5))
    file.write(sampled(first, maker, 1))  # it was in flight when its setting was replaced
    assert ids_in(tmp_path) == {"t": 3, "t.0": 2, "t.1": 5, "t.2": 1}


def test_what_is_collected_is_bounded_and_dropped_when_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch.observability.tracing.trace_file._MOST_HELD", 3000)
    setting, maker, drops = (
        setting_of(file=str(tmp_path / "t"), log_frequency=2**32 - 1),
        TraceMaker(),
        DropCounter(),
    )
    file = TraceFile(drops)
    file.write(sampled(setting, maker, 5))
    assert ids_in(tmp_path) == {"t.0": 4}
    file.close(time.monotonic() - 1)
    assert drops.counts()["shutdown"] == 1
    assert ids_in(tmp_path) == {"t.0": 4}


def test_a_full_disk_costs_traces_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    now = 0
    drops, maker = DropCounter(), TraceMaker()
    file = TraceFile(drops, lambda: now)
    setting = setting_of(file="/dev/full")
    for seconds in (0, 1, 59, 60):
        now = seconds * 10**9
        file.write(sampled(setting, maker, 2))
    assert drops.counts()["disk"] == 8
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (
            logging.WARNING,
            f"failed creating trace file: /dev/full: No space left on device; traces lost: {number}",
        )
        for number in (2, 6)
    ]


@pytest.mark.parametrize("frequency", [0, 1])
def test_a_directory_that_comes_late_is_written_to(tmp_path: Path, frequency: int) -> None:
    directory, drops, maker = tmp_path / "late", DropCounter(), TraceMaker()
    setting = setting_of(file=str(directory / "t"), log_frequency=frequency)
    file = TraceFile(drops)
    file.write(sampled(setting, maker, 1))
    directory.mkdir()
    file.write(sampled(setting, maker, 1))
    assert drops.counts()["disk"] == 1
    assert ids_in(directory) == {"t.0" if frequency else "t": 1}


@pytest.mark.parametrize("first", [0, 2])
def test_a_write_that_breaks_off_leaves_valid_json(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, maker, drops = setting_of(file=str(tmp_path / "t")), TraceMaker(), DropCounter()
    file = TraceFile(drops)
    if first:
        file.write(sampled(setting, maker, first))
    write, room = os.pwrite, 100

    def short(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal room
        if not room and len(data) > len("[]"):
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[:room] if room else data, offset)
        room = 0
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", short)
        file.write(sampled(setting, maker, 3))
    assert ids_in(tmp_path) == {"t": first}
    file.write(sampled(setting, maker, 1))
    assert ids_in(tmp_path) == {"t": first + 1}
    assert drops.counts()["disk"] == 3


def test_a_file_that_is_moved_away_is_begun_anew(tmp_path: Path) -> None:
    setting, maker = setting_of(file=str(tmp_path / "t")), TraceMaker()
    file = TraceFile(DropCounter())
    file.write(sampled(setting, maker, 2))
    (tmp_path / "t").rename(tmp_path / "old")
    file.write(sampled(setting, maker, 1))
    assert ids_in(tmp_path) == {"old": 2, "t": 1}
