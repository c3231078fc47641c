"""Views as lines of text that fit a terminal. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conch.cli.models_output import size
from conch.observability.tracing.waterfall import printable

if TYPE_CHECKING:
    from conch_tools.top.views import GpuView, ModelView, ServerView
    from conch_tools.top.watching import TopView

_GAP = 1
_SHORTEST_NAME = 12
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def _number(value: float | None) -> str:
    """Three digits, or a whole number."""
    if value is None:
        return "-"
    if not value:
        return "0"
    digits = 0 if value >= 99.5 else 1 if value >= 9.95 else 2
    return f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _workers(model: ModelView) -> str:
    return "-" if model.workers is None else f"{model.workers}/{model.workers_all}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        title: Its heading.
        width: Width of its numbers.
        text: A model's cell.
        value: Sort key of models, largest first.
        rank: Columns with the highest rank are left out first on a narrow terminal.
    """

    title: str
    width: int
    text: Callable[[ModelView], str]
    value: Callable[[ModelView], float | None]
    rank: int

    @property
    def sort(self) -> str:
        """Name of the column as a sort key."""
        return self.title.removesuffix(" ms")


COLUMNS: Sequence[Column] = (
    Column("req/s", 8, lambda model: _number(model.requests_s), lambda model: model.requests_s, 0),
    Column("fail/s", 7, lambda model: _number(model.failures_s), lambda model: model.failures_s, 2),
    Column("mean ms", 8, lambda model: _number(model.mean_ms), lambda model: model.mean_ms, 10),
    Column("p50 ms", 7, lambda model: _number(model.p50_ms), lambda model: model.p50_ms, 5),
    Column("p99 ms", 7, lambda model: _number(model.p99_ms), lambda model: model.p99_ms, 1),
    Column("queue ms", 9, lambda model: _number(model.queue_ms), lambda model: model.queue_ms, 4),
    Column("pending", 8, lambda model: _count(model.pending), lambda model: model.pending, 3),
    Column("running", 8, lambda model: _count(model.running), lambda model: model.running, 9),
    Column("batch", 6, lambda model: _number(model.batch), lambda model: model.batch, 6),
    Column("busy", 5, lambda model: _percent(model.busy), lambda model: model.busy, 7),
    Column("workers", 8, _workers, lambda model: model.workers_all, 8),
    Column("restarts", 9, lambda model: _count(model.restarts), lambda model: model.restarts, 11),
)
SORTS = (*(column.sort for column in COLUMNS), "model")
"""Names of what the table can be sorted by."""


def sorted_models(models: Sequence[ModelView], sort: str) -> list[ModelView]:
    """Models with the largest value first, then by name; by name alone for ``model``."""
    column = next((each for each in COLUMNS if each.sort == sort), None)
    if column is None:
        return sorted(models, key=lambda model: (model.model, model.version))

    def place(model: ModelView) -> tuple[float, str, str]:
        value = column.value(model)
        return (1.0 if value is None else -value, model.model, model.version)

    return sorted(models, key=place)


def table_lines(
    models: Sequence[ModelView], sort: str, width: int, most_rows: int | None = None
) -> list[str]:
    """The table, its heading first; narrow ones lack columns.

    Args:
        models: In any order.
        sort: One of `SORTS`, which is marked in the heading.
        width: Width of the lines.
        most_rows: Lines behind the heading; None for all models.
    """
    longest = max((_width(printable(model.model)) for model in models), default=0)
    version = max(3, max((len(model.version) for model in models), default=0))
    columns = _fitting(width - version - _GAP, max(_SHORTEST_NAME, min(longest, width // 3)))
    others = version + _GAP + sum(column.width + _GAP for column in columns)
    name_width = max(1, min(max(longest, _SHORTEST_NAME), width - others))
    mark = "*" if sort == "model" else ""
    heading = [_left(f"model{mark}", name_width), "ver".rjust(version)]
    for column in columns:
        mark = "*" if column.sort == sort else ""
        heading.append(f"{column.title}{mark}".rjust(column.width))
    lines = [_cut(" ".join(heading), width)]
    rows = sorted_models(models, sort)
    shown = rows
    if most_rows is not None and len(rows) > most_rows:
        shown = rows[: max(0, most_rows - 1)]
    for model in shown:
        cells = [_left(model.model, name_width), model.version.rjust(version)]
        cells += [column.text(model).rjust(column.width) for column in columns]
        lines.append(_cut(" ".join(cells), width))
    if len(shown) < len(rows) and most_rows:
        lines.append(_cut(f"... {len(rows) - len(shown)} more", width))
    return lines


def _fitting(room: int, name: int) -> list[Column]:
    """Columns, the most important ones, for which there is room beside names."""
    columns = list(COLUMNS)
    while columns and name + sum(column.width + _GAP for column in columns) > room:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def head_lines(view: TopView, last: TopView | None, width: int) -> list[str]:
    """The server in some lines.

    Args:
        view: The newest view.
        last: The newest view in which the server was there.
        width: Width of the lines.
    """
    when = f"{view.time.astimezone():%H:%M:%S}"
    if view.error is not None:
        since = "" if last is None else f", last seen {last.time.astimezone():%H:%M:%S}"
        return [
            _cut(f"conch top  {view.url}  {when}", width),
            _cut(f"no answer{since}: {view.error}", width),
        ]
    assert view.server is not None, "there is no error"
    parts = [f"conch top  {view.url}", when]
    if view.server.started is not None:
        parts.append(f"up {_span(view.time.timestamp() - view.server.started)}")
    if view.server.ready is not None:
        parts.append("ready" if view.server.ready else "not ready")
    states = [f"{count} {state.lower()}" for state, count in view.server.versions.items() if count]
    if states:
        parts.append(f"versions: {', '.join(states)}")
    lines = [_cut("  ".join(parts), width), _cut(_totals(view), width)]
    lines += [_cut(_gpu(gpu), width) for gpu in view.server.gpus]
    if view.server.failed_loads:
        lines.append(_cut(f"failed loads: {', '.join(view.server.failed_loads)}", width))
    return lines


def _totals(view: TopView) -> str:
    server = view.server
    assert server is not None
    parts = []
    if view.seconds is not None:
        requests = sum(model.requests_s or 0.0 for model in view.models)
        failures = sum(model.failures_s or 0.0 for model in view.models)
        parts.append(f"{_number(requests)} req/s, {_number(failures)} fail/s")
    parts.append(f"pending {sum(model.pending or 0 for model in view.models)}")
    return "  ".join([*parts, *_resources(server)])


def _resources(server: ServerView) -> list[str]:
    parts = []
    if server.cores is not None:
        parts.append(f"CPU {_percent(server.cores)}")
    if server.memory_bytes is not None:
        parts.append(f"memory {size(server.memory_bytes)}")
    if server.machine_memory_bytes is not None and server.machine_memory_total_bytes is not None:
        parts.append(f"machine {_part(server.machine_memory_bytes, server.machine_memory_total_bytes)}")
    return parts


def _gpu(gpu: GpuView) -> str:
    parts = [gpu.uuid]
    if gpu.utilization is not None:
        parts.append(_percent(gpu.utilization))
    if gpu.memory_bytes is not None and gpu.memory_total_bytes is not None:
        parts.append(_part(gpu.memory_bytes, gpu.memory_total_bytes))
    return "  ".join(parts)


def _part(used: int, total: int) -> str:
    return f"{size(used)} of {size(total)}"


def _span(seconds: float) -> str:
    whole = max(0, int(seconds))
    for unit, name, part, part_name in ((_DAY_S, "d", _HOUR_S, "h"), (_HOUR_S, "h", _MINUTE_S, "min")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // part} {part_name}"
    return f"{whole // _MINUTE_S} min" if whole >= _MINUTE_S else f"{whole} s"


def _cut(text: str, width: int) -> str:
    """The text, safe for terminals, or as much of it as fits."""
    text = printable(text)
    if _width(text) <= width:
        return text
    room = width - 1
    for at, character in enumerate(text):
        room -= _width(character)
        if room < 0:
            return f"{text[:at]}…" if width > 0 else ""
    return text


def _left(text: str, width: int) -> str:
    cut = _cut(text, width)
    return cut + " " * (width - _width(cut))


def _width(text: str) -> int:
    """Cells of a terminal; some characters of Asian scripts have two, and combining marks none."""
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "FW" else 1
        for each in text
    )
