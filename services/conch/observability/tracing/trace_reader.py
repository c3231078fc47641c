"""Reads trace files, those of conch and those of Triton.

Triton escapes nothing in request ids and BYTES, and writes 8-bit integers as characters. Such files are
mended: each record begins in one of three ways, and those that are not JSON are read by their shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RECORD = re.compile(r'(?<=[\[,])\{"id":\d+,"(?:model_name|timestamps|activity)":')
_HEADER = re.compile(
    r'\{"id":(?P<id>\d+),"model_name":"(?P<model_name>.*)","model_version":(?P<model_version>-?\d+)'
    r'(?:,"request_id":"(?P<request_id>.*?)")?(?:,"parent_id":(?P<parent_id>\d+))?\}',
    re.DOTALL,
)
_TENSOR = re.compile(r'\{"id":(?P<id>\d+),"activity":"\w+","tensor":\{"name":".*\}\}', re.DOTALL)
_SHOWN = 60


class TraceFileError(Exception):
    """A file can't be read; the message names it and the position."""


@dataclass(slots=True, eq=False)
class ReadTrace:
    """A trace as a file has it.

    Attributes:
        file: Path of the file.
        number: Its id.
        model: Empty if it has no header, as with tensors only.
        version: The model's version.
        request_id: Empty for none.
        parent: The trace it was made for; None for a client's.
        stamps: Names and nanoseconds, in the order of time.
        children: In the order of their ids.
    """

    file: str
    number: int
    model: str = ""
    version: int = 0
    request_id: str = ""
    parent: ReadTrace | None = None
    stamps: list[tuple[str, int]] = field(default_factory=list)
    children: list[ReadTrace] = field(default_factory=list)

    def first(self, name: str) -> int | None:
        """The first time of a name; None without one."""
        return next((ns for each, ns in self.stamps if each == name), None)

    def last(self, name: str) -> int | None:
        """The last time of a name; None without one."""
        return next((ns for each, ns in reversed(self.stamps) if each == name), None)


def read_traces(path: Path) -> list[ReadTrace]:
    """The traces of a file, by id.

    Raises:
        TraceFileError: It can't be read, or is no trace file.
    """
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from None
    traces: dict[int, ReadTrace] = {}
    parents: dict[int, int] = {}
    for place, record in enumerate(_records(path, text)):
        try:
            _take(str(path), record, traces, parents)
        except (AttributeError, KeyError, TypeError, ValueError):
            shown = json.dumps(record)[:_SHOWN]
            raise TraceFileError(f"{path}: record {place}: not a record of a trace: {shown}") from None
    for number, parent in sorted(parents.items()):
        # The file of the rest may be missing; a trace can't be made for a later one.
        if parent in traces and parent < number:
            traces[number].parent = traces[parent]
            traces[parent].children.append(traces[number])
    for trace in traces.values():
        trace.stamps.sort(key=lambda stamp: stamp[1])
    return [traces[number] for number in sorted(traces)]


def _take(file: str, record: Any, traces: dict[int, ReadTrace], parents: dict[int, int]) -> None:
    """Adds a record to its trace."""
    number = int(record["id"])
    trace = traces.get(number)
    if trace is None:
        trace = traces[number] = ReadTrace(file, number)
    if "model_name" in record:
        trace.model, trace.version = str(record["model_name"]), int(record["model_version"])
        trace.request_id = str(record.get("request_id", ""))
        if "parent_id" in record:
            parents[number] = int(record["parent_id"])
    for stamp in record.get("timestamps", ()):
        trace.stamps.append((str(stamp["name"]), int(stamp["ns"])))


def _records(path: Path, text: str) -> Iterator[Any]:
    try:
        content = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        starts = [match.start() for match in _RECORD.finditer(text)]
        if not starts:
            where = f"{path}:{error.lineno}:{error.colno}"
            raise TraceFileError(f"{where}: not a trace file: {error.msg}") from None
        yield from _mended(path, text, starts)
        return
    if not isinstance(content, list):
        raise TraceFileError(f"{path}:1:1: not a trace file: expected a list of records")
    yield from content


def _mended(path: Path, text: str, starts: list[int]) -> Iterator[Any]:
    """The records of a file that is not JSON."""
    end = len(text.rstrip())
    if text[end - 1] != "]":
        raise TraceFileError(f"{_position(path, text, end)}: the file is cut off: expected ]")
    for start, following in zip(starts, [*starts[1:], end], strict=True):
        record = text[start : following - 1]  # without the comma or bracket behind it
        try:
            yield json.loads(record, strict=False)
        except json.JSONDecodeError:
            if match := _HEADER.fullmatch(record):
                yield {name: value for name, value in match.groupdict().items() if value is not None}
            elif match := _TENSOR.fullmatch(record):
                yield match.groupdict()
            else:
                shown = json.dumps(record[:_SHOWN])
                raise TraceFileError(f"{_position(path, text, start)}: a broken record: {shown}") from None


def _position(path: Path, text: str, offset: int) -> str:
    return f"{path}:{text.count(chr(10), 0, offset) + 1}:{offset - text.rfind(chr(10), 0, offset)}"
