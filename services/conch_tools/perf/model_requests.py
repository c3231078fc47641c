"""The requests of a model: values for its inputs, as ready requests or sequences of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from conch_tools.perf.load.input_data import (
    DataError,
    Row,
    made_up,
    output_rules,
    read_files,
    read_payloads,
    rules_of,
)
from conch_tools.perf.load.ready_requests import (
    InputTensor,
    Place,
    ReadyRequest,
    grpc_request,
    http_request,
    json_request,
)
from conch_tools.perf.load.sequences import SequencePlan
from conch_tools.perf.measure.results import Load
from conch_tools.perf.perf_settings import PerfSettings, SequenceSettings, SettingError
from conch_tools.perf.shared_tensors import output_sizes, shared_tensors
from conch_tools.server_api import ServerApi

_POOL = 64
"""Requests with values of their own, so that caches of the server do not answer."""

_SEQUENCE_LENGTH = 20
"""Requests of a sequence, unless the data or the user says otherwise; perf_analyzer's number."""

_MOST_ID = 2**31 - 1
"""Fits all integers that a model may have ids in."""


@dataclass(frozen=True)
class MadeRequests:
    """The requests of a load.

    Attributes:
        streams: By sequences of the data; one sequence of all without such data.
        inputs: Inputs of each row, or its payload.
    """

    streams: Sequence[Sequence[ReadyRequest]]
    inputs: Sequence[Sequence[InputTensor] | bytes]


@contextmanager
def model_requests(
    settings: PerfSettings, api: ServerApi, config: Mapping[str, Any], decoupled: bool
) -> Iterator[MadeRequests]:
    """The requests of the settings.

    Shared memory is there until the end of the block.

    Raises:
        SettingError, DataError: The settings or the data do not fit the model.
        AskError: The server takes no shared memory.
    """
    if settings.path:
        payloads = _payloads(settings)
        yield MadeRequests([[ReadyRequest(body, row=row) for row, body in enumerate(payloads)]], payloads)
        return
    parameters = dict(settings.parameters)
    numbers = count()
    if decoupled:
        parameters["triton_enable_empty_final_response"] = True

    def ready(row: Row, tensors: Sequence[InputTensor], outputs: Mapping[str, Place]) -> ReadyRequest:
        if settings.tensors == "json":
            made = _json_request(tensors, parameters)
        elif settings.endpoint.protocol == "http":
            made = http_request(tensors, parameters, outputs)
        else:
            made = grpc_request(settings.model, settings.version, tensors, parameters, outputs)
        return replace(made, expected=row.expected, row=next(numbers))

    rows = _rows(settings, config)
    if any(row.expected is not None for stream in rows for row in stream):
        _check_validation(settings, decoupled)
    inputs = [row.tensors for stream in rows for row in stream]
    if not settings.shared_memory:
        yield MadeRequests([[ready(row, row.tensors, {}) for row in stream] for stream in rows], inputs)
        return
    sizes = output_sizes(config, settings.batch, settings.output_size)
    with shared_tensors(api, [[row.tensors for row in stream] for stream in rows], sizes) as placed:
        streams = [
            [ready(row, *places) for row, places in zip(*each, strict=True)]
            for each in zip(rows, placed, strict=True)
        ]
        yield MadeRequests(streams, inputs)


def _check_validation(settings: PerfSettings, decoupled: bool) -> None:
    kinds = {
        "responses of decoupled models": decoupled,
        "outputs in shared memory": settings.shared_memory,
        "outputs as JSON": settings.tensors == "json",
    }
    for what, is_so in kinds.items():
        if is_so:
            raise SettingError(f"{what} are not compared: remove 'validation_data', or the files of outputs")


def _json_request(tensors: Sequence[InputTensor], parameters: Mapping[str, Any]) -> ReadyRequest:
    try:
        return json_request(tensors, parameters)
    except ValueError as error:
        raise DataError(f"--tensors json: {error}") from None


def _payloads(settings: PerfSettings) -> list[bytes]:
    files = [each for each in settings.data if isinstance(each, Path)]
    if len(files) < len(settings.data):
        raise SettingError("--endpoint needs --data FILE.json with payloads")
    return read_payloads(files)


def _rows(settings: PerfSettings, config: Mapping[str, Any]) -> list[list[Row]]:
    rules = rules_of(config, settings.shapes)
    batched = int(config.get("max_batch_size", 0)) > 0
    most = int(config.get("max_batch_size", 0))
    if settings.batch > max(most, 1):
        raise SettingError(f"-b {settings.batch}: model '{settings.model}' has max_batch_size {most}")
    kinds = [each for each in settings.data if isinstance(each, str)]
    paths = [each for each in settings.data if isinstance(each, Path)]
    if (kinds and paths) or len(kinds) > 1:
        raise SettingError("--data takes random, zero, or files and directories")
    if paths:
        outputs = output_rules(config)
        return read_files(paths, rules, outputs, settings.batch, batched, settings.skips_unknown)
    pool = 1 if settings.reuse_data or kinds == ["zero"] else _POOL
    made = made_up(rules, settings.batch, batched, pool, kinds[0], settings.seed, settings.text_length)
    return [[Row(tensors) for tensors in made]]


def sequence_batching(
    api: ServerApi, settings: PerfSettings, config: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The sequence batcher of a model, or of one that an ensemble or a BLS model calls; None without one."""
    if (found := config.get("sequence_batching")) is not None:
        return dict(found)
    for step in config.get("ensemble_scheduling", {}).get("step", ()):
        composing = api.config(step["model_name"], "")
        if (inner := sequence_batching(api, replace(settings, composing={}), composing)) is not None:
            return inner
    for name, version in settings.composing.items():
        if (found := api.config(name, version).get("sequence_batching")) is not None:
            return dict(found)
    return None


def check_sequences(settings: PerfSettings) -> None:
    """Raises SettingError: the settings are none for sequences."""
    if settings.batch > 1:
        raise SettingError(f"-b {settings.batch}: requests of sequences have one row")
    if settings.tensors == "json":
        raise SettingError("--tensors json: requests of sequences have binary tensors")
    ids = (settings.sequences or SequenceSettings()).ids
    for load in settings.loads:
        live = live_sequences(settings, load)
        if ids and len(ids) < live:
            raise SettingError(f"{live} live sequences need as many ids, but there are {len(ids)}")


def live_sequences(settings: PerfSettings, load: Load) -> int:
    """Sequences that a load has at the same time."""
    return int(load.value) if load.mode == "concurrency" else (settings.sequences or SequenceSettings()).live


def sequence_plan(
    settings: PerfSettings, streams: Sequence[Sequence[ReadyRequest]], batching: Mapping[str, Any]
) -> SequencePlan:
    """The sequences of a load; made-up data begins at another request for each."""
    asked = settings.sequences or SequenceSettings()
    length = asked.length
    if not any(isinstance(each, Path) for each in settings.data):
        (pool,) = streams
        streams = [[*pool[first:], *pool[:first]] for first in range(len(pool))]
        length = length or _SEQUENCE_LENGTH
    ids = asked.ids
    if not ids:  # two runs against one server should not have the same
        first = secrets.randbelow(_MOST_ID // 2) + 1
        ids = range(first, _MOST_ID + 1)
    kinds = {
        control.get("data_type")
        for each in batching.get("control_input", ())
        for control in each.get("control", ())
        if control.get("kind") == "CONTROL_SEQUENCE_CORRID"
    }
    return SequencePlan(streams, ids, "TYPE_STRING" in kinds, length, asked.variation)
