"""Rows of a file as requests of a batch each, and the outputs as rows of another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Tensor
from conch_frames.conversion import table_tensors
from conch_frames.frame_error import FrameError
from conch_frames.output_columns import output_columns
from conch_tools.infer.bulk import Sender, run_in_order
from conch_tools.infer.client import CallError, InferRequest, InferResponse
from conch_tools.infer.inference import RemoteModel
from conch_tools.infer.input_values import InputError
from conch_tools.infer.row_files import RowFileError, RowReader, RowWriter, first_rows

_MOST_ROWS = 8192


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of a run.

    Attributes:
        rows: Rows that were written.
        seconds: Length of the run.
    """

    rows: int
    seconds: float


class RowRunError(Exception):
    """A run has ended early.

    Attributes:
        next_row: The first row that is not written, from which the run can go on.
        reached: False if there is no server.
        interrupted: True after a KeyboardInterrupt.
    """

    def __init__(self, message: str, next_row: int, reached: bool = True, interrupted: bool = False) -> None:
        super().__init__(message)
        self.next_row = next_row
        self.reached = reached
        self.interrupted = interrupted


def check_model(model: RemoteModel, outputs: Sequence[str], parameters: Mapping[str, Any]) -> None:
    """Checks that a model can answer rows, before a file is opened for them. Raises CallError, InputError."""
    if model.signature.decoupled:
        raise InputError(f"model '{model.signature.name}' is decoupled, and may not answer row by row")
    model.request_of([], outputs=outputs, parameters=parameters)


def run_rows(
    model: RemoteModel,
    reader: RowReader,
    writer: RowWriter,
    *,
    start_row: int = 0,
    outputs: Sequence[str] = (),
    workers: int = 4,
    retries: int = 3,
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> RowResult:
    """Sends the rows of a file, and writes the outputs of each row in their order.

    Args:
        model: The model, whose inputs are columns.
        reader: The rows.
        writer: Takes the outputs.
        start_row: Number of rows to leave out.
        outputs: Names of the outputs to return; all if empty.
        workers: Requests in flight.
        retries: Number of times that a request is sent again if the server is unreachable or too busy.
        parameters: Parameters of each request.
        timeout_s: Time limit of a request; None for no limit.
        progress: Called with the number of rows that are written.

    Raises:
        InputError: A name or a parameter does not fit the model.
        RowRunError: A row does not fit the model, a request failed, or a file can't be read or written; the
            rows before are written, also at a KeyboardInterrupt.
    """
    began = time.monotonic()
    sender = Sender(model, retries)
    run = _RowRun(model, sender, writer, start_row)
    make = partial(model.request_of, outputs=outputs, parameters=parameters, timeout_s=timeout_s)

    def take(answer: _Answer) -> None:
        run.take(answer)
        progress(run.next_row)

    try:
        run_in_order(run.jobs(reader, make), take, workers, sender)
    except CallError as error:
        raise RowRunError(str(error), run.next_row, error.reached) from None
    except InvalidArgumentError as error:
        raise RowRunError(error.message, run.next_row) from None
    except (RowFileError, OSError) as error:
        raise RowRunError(str(error), run.next_row) from None
    except KeyboardInterrupt:
        raise RowRunError("interrupted", run.next_row, interrupted=True) from None
    return RowResult(run.next_row - start_row, time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The response to a request of some rows."""

    rows: int
    response: InferResponse


class _RowRun:
    """The requests of a run, and what is written of it."""

    def __init__(self, model: RemoteModel, sender: Sender, writer: RowWriter, start_row: int) -> None:
        self._columns = model.signature.columns
        self._sender = sender
        self._writer = writer
        self._start_row = start_row
        self.next_row = start_row

    def jobs(
        self, reader: RowReader, make: Callable[[Sequence[Tensor]], InferRequest]
    ) -> Iterator[Callable[[], _Answer]]:
        """Sends each batch. Raises FrameError: a row does not fit the model; those before are sent."""
        first = self._start_row
        for table in reader.tables(first, self._columns.wants):
            if table.columns and not table.rows:
                continue  # such as a file with a header alone
            wrong: FrameError | None = None
            try:
                tensors = table_tensors(table, self._columns)
            except FrameError as error:
                if not error.row:
                    raise error.moved(first) from None
                wrong = error
                tensors = table_tensors(first_rows(table, error.row), self._columns)
            yield from self._batches(tensors, first, make)
            if wrong is not None:
                raise wrong.moved(first)
            first += table.rows

    def _batches(
        self,
        tensors: Mapping[str, Tensor],
        first: int,
        make: Callable[[Sequence[Tensor]], InferRequest],
    ) -> Iterator[Callable[[], _Answer]]:
        most = self._columns.most_rows or _MOST_ROWS
        rows = next(iter(tensors.values())).shape[0]
        for start in range(0, rows, most):
            stop = min(start + most, rows)
            request = make([_cut(tensor, start, stop) for tensor in tensors.values()])
            yield partial(self._send, request, first + start, stop - start)

    def _send(self, request: InferRequest, first: int, rows: int) -> _Answer:
        try:
            (response,) = self._sender.send(request)
        except CallError as error:
            where = f"rows {first} to {first + rows - 1}" if rows > 1 else f"row {first}"
            raise CallError(f"{where}: {error}", error.reached, error.passing) from None
        return _Answer(rows, response)

    def take(self, answer: _Answer) -> None:
        """Writes the outputs of the next rows."""
        columns = output_columns(answer.response.arrays)
        for name, values in columns.items():
            if len(values) != answer.rows:
                raise InvalidArgumentError(
                    f"output '{name}' has {len(values)} rows for {answer.rows}: the model does not answer "
                    f"row by row"
                )
        self._writer.write(columns)
        self.next_row += answer.rows


def _cut(tensor: Tensor, start: int, stop: int) -> Tensor:
    return Tensor.from_array(tensor.name, tensor.numpy()[start:stop], tensor.datatype)
