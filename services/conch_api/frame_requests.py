"""Rows of a frame as requests: cut into batches, several at a time, joined in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from conch.core.errors import ConchError, InternalError
from conch.core.tensor import Array, Tensor
from conch_frames.column import Column, column_of
from conch_frames.column_rules import ModelColumns
from conch_frames.conversion import Table, table_tensors
from conch_frames.frame_error import FrameError
from conch_frames.libraries import frame_like, frame_table
from conch_frames.output_columns import output_columns

MOST_OPEN = 8
"""Requests of a frame that are open at a time."""

_MOST_ROWS = 8192


class Pending(Protocol):
    """A request that has been sent."""

    def result(self) -> Mapping[str, Array]:
        """Its outputs, when they are there. Raises ConchError."""

    def cancel(self) -> None:
        """Gives it up."""


class FrameRun:
    """A frame for a model, its rows as requests, and their outputs as a frame.

    Args:
        frame: A frame of pandas, polars or pyarrow, or a mapping of columns.
        columns: The model's.

    Raises:
        FrameError: It is no frame, or has a type of column that no model takes.
        UnavailableError: A package for frames is not installed.
    """

    def __init__(self, frame: Any, columns: ModelColumns) -> None:
        self._frame = frame
        self._columns = columns
        table = frame_table(frame)
        self._values = {name: column_of(name, values) for name, values in table.columns.items()}
        self._rows = table.rows
        # A model without a batch dimension has all rows, or one, in a request.
        most = min(columns.most_rows, _MOST_ROWS) if columns.max_batch_size else columns.most_rows
        self._step = most or max(self._rows, 1)
        self._parts: list[Mapping[str, Array]] = []

    def requests(self) -> Iterator[dict[str, Tensor]]:
        """The inputs of each request. Raises FrameError: a value does not fit; the text says where."""
        for start in range(0, max(self._rows, 1), self._step):
            part = {name: _cut(column, start, start + self._step) for name, column in self._values.items()}
            try:
                yield table_tensors(Table(part), self._columns)
            except FrameError as error:
                raise error.moved(start) from None

    def add(self, outputs: Mapping[str, Array]) -> None:
        """Takes the outputs of the next request."""
        self._parts.append(outputs)

    def failed(self, error: ConchError) -> ConchError:
        """The error of the next request, with its rows if there are others."""
        if self._rows <= self._step:
            return error
        start = len(self._parts) * self._step
        stop = min(start + self._step, self._rows)
        found = type(error)(f"rows {start} to {stop - 1}: {error.message}")
        found.retry_after_ms = error.retry_after_ms
        return found

    def result(self) -> Any:
        """The outputs as a frame like the given one. Raises ConchError: they have not a row for each."""
        return frame_like(output_columns(_joined(self._parts)), self._frame)


def run_in_order(run: FrameRun, begun: Iterator[Pending]) -> Any:
    """The outputs of a frame; the iterator sends each request when it is asked for it."""
    waiting: deque[Pending] = deque()
    try:
        for each in begun:
            waiting.append(each)
            if len(waiting) == MOST_OPEN:
                _take(run, waiting.popleft())
        while waiting:
            _take(run, waiting.popleft())
    finally:
        for each in waiting:
            each.cancel()
    return run.result()


def _take(run: FrameRun, pending: Pending) -> None:
    try:
        outputs = pending.result()
    except ConchError as error:
        raise run.failed(error) from error
    run.add(outputs)


async def run_in_order_async(run: FrameRun, calls: Iterator[Coroutine[Any, Any, Mapping[str, Array]]]) -> Any:
    """As `run_in_order`, of coroutines."""
    waiting: deque[asyncio.Task[Mapping[str, Array]]] = deque()

    async def take() -> None:
        try:
            outputs = await waiting[0]
        except ConchError as error:
            raise run.failed(error) from error
        waiting.popleft()
        run.add(outputs)

    try:
        for call in calls:
            waiting.append(asyncio.create_task(call))
            if len(waiting) == MOST_OPEN:
                await take()
        while waiting:
            await take()
    finally:
        for task in waiting:
            task.cancel()
        for task in waiting:
            with suppress(asyncio.CancelledError, ConchError):
                await task
    return run.result()


def _cut(column: Column, start: int, stop: int) -> Column:
    nulls = None if column.nulls is None else column.nulls[start:stop]
    if column.codes is None:
        return Column(column.values[start:stop], nulls)
    return Column(column.values, nulls, column.codes[start:stop])


def _joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    try:
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except (KeyError, ValueError) as error:
        raise InternalError(f"the outputs of a model's batches can't be joined: {error}") from None
