"""`InputProfile`: the columns of a version's requests, counted on a thread of their own.

One life of a sample:

1. `sample`, before the model has the request: its inputs are copied, in part where they are large. A view
   would keep the whole message, or a block of a front process.
   The bound is `_MOST_BYTES` of an input, or `MOST_ROWS` of the columns that are profiled.
2. `add`, once the model has taken the request; then the profile is full after `_MOST_SAMPLES`, `_MOST_FOLDED`
   rows or `_MOST_FOLDED_BYTES`, and takes no more.
3. `fold`, on the thread of `Profiler`, counts all samples. The profile takes others after `reopen`, when that
   thread has rested.

So a request that is not sampled costs the test of an attribute, and the rest of the work has a share of the
time that does not depend on what clients send. A profile belongs to one load of a version, and is lost with
it. What it holds is bounded: `MOST_COLUMNS` columns, each with sketches of two windows.

Threads and locks: `sample` and `add` on threads of requests, `fold` and `reopen` on the profiler's, the rest
on any; one lock for the samples and one for the columns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from conch.core.clock import Clock, monotonic_ns
from conch.core.tensor import NUMPY_DTYPES, Tensor
from conch_frames.column_rules import ModelColumns
from conch_profiles.column_profile import (
    CategoryProfile,
    NumberProfile,
    column_profile,
    first_texts,
    spread,
)
from conch_profiles.sketches import MOST_ENCODED
from conch_profiles.training_profile import TrainingProfile

log = logging.getLogger(__name__)

MOST_COLUMNS = 100
"""Columns of a model that are profiled; the first ones."""

MOST_ROWS = 512
"""Rows of a request that are counted: spread over it, of texts the first ones."""

_MOST_SAMPLES = 64
_MOST_FOLDED = 2048
_MOST_FOLDED_BYTES = 4 << 20
_MOST_BYTES = 64 << 10
_MOST_TEXTS = 4 << 10
_NS_PER_S = 1e9

Piece = Any
"""Part of an input that is kept: data in wire form, an array, or a list of texts."""


class Sample(NamedTuple):
    """Part of a request that is kept: a piece by input, the number of its rows, and about its bytes."""

    pieces: Mapping[str, Piece]
    rows: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ColumnFigures:
    """Figures of a column for metrics.

    Attributes:
        name: The column.
        nulls: Share of nulls.
        psi: The population stability index; None if it can't be told.
        new: Share of new categories; None if that can't be told.
    """

    name: str
    nulls: float
    psi: float | None
    new: float | None


class InputProfile:
    """Columns of the requests of one loaded version.

    Args:
        columns: The model's columns.
        training: The training set's profile; None without one.
        training_note: Reason for which the file of a training set is not used; empty for none.
        window_s: Length of a window in seconds.
        clock: Monotonic time in nanoseconds.

    Attributes:
        is_open: True if it takes another sample.
        requests: Requests that were counted, in all windows.
        rows: Their rows that were counted.
        left_out: Columns that are not profiled.
    """

    def __init__(
        self,
        columns: ModelColumns,
        training: TrainingProfile | None,
        training_note: str,
        window_s: float,
        clock: Clock = monotonic_ns,
    ) -> None:
        known = {} if training is None else training.columns
        without_spaces = {name.replace(" ", "_"): each for name, each in known.items()}
        self._matrix = None if columns.matrix is None else columns.matrix.name
        self._columns: list[NumberProfile | CategoryProfile] = []
        self._places: list[tuple[str, int]] = []  # of each column: its input, and its place in a matrix
        self._datatypes: dict[str, str] = {}
        self.left_out: list[str] = []
        for place, (name, rule) in enumerate(columns.rules.items()):
            made = None
            if len(self._columns) < MOST_COLUMNS:
                column = known.get(name) or (without_spaces.get(name) if rule.spaces else None)
                made = column_profile(rule, column, training is not None)
            if made is None:
                self.left_out.append(name)
                continue
            self._columns.append(made)
            self._places.append((self._matrix or name, place))
            self._datatypes[self._matrix or name] = rule.datatype
        self._width = len(columns.rules)
        # Columns of a matrix have one datatype: the first ones are profiled, or none.
        self._used_width = self._places[-1][1] + 1 if self._places and self._matrix else 1
        self._training = training
        self._training_note = training_note
        self._window_ns = int(window_s * _NS_PER_S)
        self._clock = clock
        self._begun_ns = self._window_begun_ns = clock()
        self._samples_lock, self._lock = threading.Lock(), threading.Lock()
        self._samples: list[Sample] = []
        self._sampled_rows = self._sampled_bytes = 0
        self.is_open = True
        self.requests = self.rows = 0

    # --- threads of requests

    def sample(self, inputs: Mapping[str, Tensor]) -> Sample | None:
        """A sample of a request that is not validated yet; None if its inputs can't be read."""
        pieces, rows = {}, 0
        try:
            for name, datatype in self._datatypes.items():
                tensor = inputs.get(name)
                if tensor is None or tensor.on_device:
                    continue
                shape, width = tensor.shape, 1
                if name == self._matrix:
                    width = self._width
                    if len(shape) > 1 and shape[-1] != width:
                        continue  # of another width than the columns that have names
                pieces[name] = _kept(tensor, datatype, width, self._used_width, shape[0])
                rows = max(rows, shape[0])
        except Exception:  # boundary: the request goes on, and the model refuses inputs that are malformed
            log.debug("a request could not be sampled", exc_info=True)
            return None
        return Sample(pieces, min(rows, MOST_ROWS), sum(map(_size, pieces.values())))

    def add(self, sample: Sample) -> bool:
        """Adds a sample; True if it is the first since the profile is open."""
        with self._samples_lock:
            if not self.is_open:
                return False
            self._samples.append(sample)
            self._sampled_rows += sample.rows
            self._sampled_bytes += sample.nbytes
            count = len(self._samples)
            is_full = self._sampled_rows >= _MOST_FOLDED or self._sampled_bytes >= _MOST_FOLDED_BYTES
            self.is_open = count < _MOST_SAMPLES and not is_full
            return count == 1

    # --- the profiler's thread

    def fold(self, pause: Callable[[], None]) -> None:
        """Counts all samples, and takes no others before `reopen`; calls `pause` between columns."""
        with self._samples_lock:
            samples, self._samples = self._samples, []
            self._sampled_rows = self._sampled_bytes = 0
            self.is_open = False
        self._turn()
        inputs: dict[str, Any] = {}
        most = 0
        for column, (name, place) in zip(self._columns, self._places, strict=True):
            if name not in inputs:
                inputs[name] = self._joined(name, samples)
                pause()
            values = inputs[name]
            if values is None:
                continue
            if name == self._matrix:
                values = values[:, place]
            with self._lock:
                most = max(most, column.add(values))
            pause()
        with self._lock:
            self.requests += len(samples)
            self.rows += most

    def reopen(self) -> None:
        """Takes samples again."""
        self.is_open = True

    def _joined(self, name: str, samples: Sequence[Sample]) -> Any:
        """The values of an input in all samples, a row for each of a matrix; None without any."""
        datatype = self._datatypes[name]
        width = self._width if name == self._matrix else 0
        pieces = [sample.pieces[name] for sample in samples if name in sample.pieces]
        if datatype == "BYTES":
            most = MOST_ROWS * max(width, 1)
            texts: list[Any] = []
            for piece in pieces:
                found = piece if isinstance(piece, list) else first_texts(piece, most)
                texts += found[: len(found) - len(found) % max(width, 1)]  # it may end within a row
            if not texts:
                return None
            values = np.empty(len(texts), object)
            values[:] = texts
        else:
            dtype = NUMPY_DTYPES[datatype]
            arrays = [
                piece
                if isinstance(piece, np.ndarray)
                else np.frombuffer(piece, dtype).reshape(-1, max(width, 1))[:, : self._used_width]
                for piece in pieces
            ]
            if not arrays:
                return None
            values = np.concatenate(arrays)
            return values if width else values.reshape(-1)
        return values.reshape(-1, width) if width else values

    # --- any thread

    def _turn(self) -> None:
        """Begins a window if the present one is over."""
        now_ns = self._clock()
        with self._lock:
            gone_ns = now_ns - self._window_begun_ns
            if gone_ns < self._window_ns:
                return
            is_next = gone_ns < 2 * self._window_ns
            self._begun_ns = self._window_begun_ns if is_next else now_ns
            self._window_begun_ns = now_ns
            for column in self._columns:
                column.turn()
                if not is_next:
                    column.turn()  # the window before had no requests

    def figures(self) -> list[ColumnFigures]:
        """The figures of all columns for metrics."""
        self._turn()
        found = []
        for column in self._columns:
            with self._lock:
                nulls = column.nulls / max(column.rows, 1)
                found.append(ColumnFigures(column.name, nulls, column.psi, column.new))
        return found

    def as_object(self) -> dict[str, Any]:
        """The profile as JSON; takes about 1 ms for each column."""
        self._turn()
        columns = []
        for column in self._columns:
            with self._lock:
                columns.append(column.as_object())
        training = None if self._training is None else {"rows": self._training.rows}
        return {
            "requests": self.requests,
            "rows": self.rows,
            "seconds": (self._clock() - self._begun_ns) / _NS_PER_S,
            "training": training,
            "training_note": self._training_note,
            "left_out": self.left_out,
            "columns": columns,
        }


def _kept(tensor: Tensor, datatype: str, width: int, used_width: int, rows: int) -> Piece:
    """Copies an input: its data, an array of two dimensions with `used_width` columns, or a list of texts."""
    if datatype == "BYTES":
        if tensor.has_data:
            return bytes(memoryview(tensor.data)[:_MOST_BYTES])
        most = max(min(MOST_ROWS, _MOST_TEXTS // width), 1) * width
        texts = tensor.numpy().reshape(-1)[:most].tolist()
        return [each[:MOST_ENCODED] if isinstance(each, str | bytes) else each for each in texts]
    if rows <= MOST_ROWS and tensor.has_data and tensor.nbytes <= _MOST_BYTES:
        return bytes(tensor.data)
    return spread(tensor.numpy().reshape(-1, width)[:, :used_width], MOST_ROWS).copy()


def _size(piece: Piece) -> int:
    if isinstance(piece, list):
        return len(piece) * MOST_ENCODED
    return len(piece) if isinstance(piece, bytes) else int(piece.nbytes)
