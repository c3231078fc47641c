"""Lines that wait to be written: no thread waits for them, and none is lost without being counted."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.core import WAIT_S
from tests.support.servers import ROOT, eventually

from conch.observability.logging.line_writer import LineSource, LineWriter
from conch.observability.logging.log_sinks import DescriptorSink, FileSink, Sink


class Place(Sink):
    """A sink that takes what it is given when it is let, and may have no room."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.entered = threading.Event()
        self.full = False
        self.reopened = 0
        self.unreachable = False
        self.closed = 0

    @property
    def lines(self) -> list[str]:
        return "".join(self.texts).splitlines()

    def write(self, text: str) -> None:
        self.entered.set()
        assert self.goes_on.wait(WAIT_S)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.texts.append(text)

    def reopen(self) -> None:
        if self.unreachable:
            raise OSError(errno.ENOENT, "No such file or directory")
        self.reopened += 1

    def close(self) -> None:
        self.closed += 1


class Upper(LineSource[str]):
    """Makes lines in capitals."""

    def line(self, item: str) -> str:
        return str.upper(item)

    def dropped_items(self, count: int) -> str:
        return f"{count} dropped"

    def reopen_failed(self, error: OSError) -> str:
        return f"failed: {error.strerror}"


@contextmanager
def writing(sink: Sink, capacity: int = 1 << 20, gather_s: float = 0.0) -> Iterator[LineWriter[str]]:
    writer = LineWriter("test-writer", sink, Upper(), capacity=capacity, gather_s=gather_s)
    try:
        yield writer
    finally:
        if isinstance(sink, Place):
            sink.goes_on.set()
        assert writer.close(WAIT_S)


@pytest.mark.parametrize("gather_s", [0.0, 1000.0])
def test_lines_are_written_in_order(gather_s: float) -> None:
    place = Place()
    with writing(place, gather_s=gather_s) as writer:
        for number in range(1000):
            writer.put(f"line {number}", 10)
        assert writer.flush(WAIT_S)
        assert place.lines == [f"LINE {number}" for number in range(1000)]
        writer.put("last", 10)
    assert place.lines[-1] == "LAST"
    assert place.closed == 1


def test_nobody_waits_for_a_sink_that_hangs() -> None:
    place = Place()
    with writing(place, capacity=100) as writer:
        place.goes_on.clear()
        writer.put("first", 10)
        assert place.entered.wait(WAIT_S)
        for number in range(50):
            writer.put(str(number), 10)
        assert not writer.flush(0.01)
        place.goes_on.set()
        assert writer.flush(WAIT_S)
        assert place.lines == ["FIRST", "41 DROPPED", *map(str, range(9))] or place.lines == [
            "FIRST",
            *map(str, range(9)),
            "41 DROPPED",
        ]


def test_one_line_larger_than_all_room_is_written() -> None:
    place = Place()
    with writing(place, capacity=100) as writer:
        writer.put("large", 1000)
        assert writer.flush(WAIT_S)
    assert place.lines == ["LARGE"]


def test_lines_that_a_full_disk_did_not_take_are_counted() -> None:
    place = Place()
    with writing(place) as writer:
        place.full = True
        for _ in range(3):
            writer.put("lost", 10)
            assert writer.flush(WAIT_S)
        place.full = False
        writer.put("kept", 10)
        assert writer.flush(WAIT_S)
        writer.put("next", 10)
    assert place.lines == ["KEPT", "3 DROPPED", "NEXT"]


def test_a_line_that_can_not_be_made_is_counted() -> None:
    place = Place()
    with writing(place) as writer:
        writer.put(None, 1)  # type: ignore[arg-type]
        writer.put("kept", 1)
    assert place.lines == ["KEPT", "1 DROPPED"]


def test_it_ends_though_the_sink_hangs() -> None:
    place = Place()
    with writing(place) as writer:
        place.goes_on.clear()
        writer.put("first", 10)
        assert place.entered.wait(WAIT_S)
        assert not writer.close(0.01)
        assert not place.closed
        writer.put("late", 10)
    assert place.lines == ["FIRST"]


def test_a_file_is_opened_anew(tmp_path: Path) -> None:
    path, old = tmp_path / "log", tmp_path / "log.1"
    path.write_text("before\n")
    with writing(FileSink(path)) as writer:
        writer.put("one", 1)
        assert writer.flush(WAIT_S)
        path.rename(old)
        writer.put("two", 1)
        assert writer.flush(WAIT_S)
        writer.reopen()
        assert writer.flush(WAIT_S)
        writer.put("three", 1)
    assert old.read_text() == "before\nONE\nTWO\n"
    assert path.read_text() == "THREE\n"


def test_a_file_that_can_not_be_opened_anew_stays_in_use() -> None:
    place = Place()
    with writing(place) as writer:
        place.unreachable = True
        writer.reopen()
        assert writer.flush(WAIT_S)
        assert place.lines == ["FAILED: NO SUCH FILE OR DIRECTORY"]
        place.unreachable = False
        writer.reopen()
        assert writer.flush(WAIT_S)
    assert place.reopened == 1


FORKING = """
import os
import subprocess
import sys
import sys
from pathlib import Path
from tests.conch.unit.observability.test_line_writer import writing
from conch.observability.logging.log_sinks import FileSink

with writing(FileSink(Path(sys.argv[1]))) as writer:
    writer.put("parent", 1)
    assert writer.flush(1000)
    child = os.fork()
    if not child:
        code = 1
        try:
            writer.put("child", 1)
            code = 0 if writer.flush(0.0) and writer.close(0.0) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    writer.put("parent again", 1)
"""


@pytest.mark.process
def test_a_forked_process_writes_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "log"
    # In a process of its own: in this one gRPC, where it has been used, makes descriptors at each fork.
    subprocess.run([sys.executable, "-c", FORKING, str(path)], check=True, timeout=WAIT_S, cwd=ROOT)
    assert path.read_text() == "PARENT\nCHILD\nPARENT AGAIN\n"


def test_a_descriptor_that_somebody_made_non_blocking() -> None:
    """Terminals and pipes are shared, and another owner may have made them so."""
    reader, end = os.pipe()
    os.set_blocking(end, False)
    text = "x" * 300_000 + "\n"
    try:
        with writing(DescriptorSink(end)) as writer:
            writer.put(text[:-1], len(text))
            taken = b""
            while len(taken) < len(text):
                taken += os.read(reader, 1 << 16)
            assert taken.decode() == text.upper()
    finally:
        os.close(reader)
        os.close(end)


def test_a_pipe_without_a_reader() -> None:
    reader, end = os.pipe()
    os.close(reader)
    try:
        with writing(DescriptorSink(end)) as writer:
            writer.put("nobody hears", 1)
            assert writer.flush(WAIT_S)
            eventually(lambda: writer.dropped == 1, "it is counted")
    finally:
        os.close(end)


def test_after_a_torn_line_the_next_one_begins_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as file:
        sink = DescriptorSink(file.fileno())
        write = os.write

        def some(descriptor: int, data: bytes) -> int:
            if not path.stat().st_size:
                return write(descriptor, data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", some)
        with pytest.raises(OSError, match="No space"):
            sink.write("torn line\n")
        monkeypatch.undo()
        sink.write("whole line\n")
        sink.write("next\n")
    assert path.read_text() == "tor\nwhole line\nnext\n"
