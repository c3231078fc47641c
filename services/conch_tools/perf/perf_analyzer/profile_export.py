"""The JSON of ``--profile-export-file``, that GenAI-Perf reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conch_tools.perf.measure.records import RequestRecord
from conch_tools.perf.measure.results import Load

_MODES = {"concurrency": "concurrency", "rate": "request_rate"}


@dataclass(frozen=True, slots=True)
class Experiment:
    """The records of one point.

    Attributes:
        window_boundaries: Wall-clock times in ns: the begin of the first window, the end of each.
    """

    load: Load
    records: Sequence[RequestRecord]
    window_boundaries: Sequence[int]


def as_json(experiments: Iterable[Experiment], version: str, endpoint: str = "") -> str:
    """The file's text; with an endpoint, of payloads that were posted there."""
    whole = {
        "experiments": [_experiment(one) for one in experiments],
        "version": version,
        "service_kind": "openai" if endpoint else "triton",
        "endpoint": endpoint,
    }
    return json.dumps(whole)


def _experiment(one: Experiment) -> dict[str, object]:
    value = int(one.load.value) if one.load.mode == "concurrency" else one.load.value
    return {
        "experiment": {"mode": _MODES[one.load.mode], "value": value},
        "requests": [_request(record) for record in one.records],
        "window_boundaries": list(one.window_boundaries),
    }


def _request(record: RequestRecord) -> dict[str, object]:
    sequence = {} if record.sequence_id is None else {"sequence_id": record.sequence_id}
    return {
        "timestamp": record.timestamp_ns,
        **sequence,
        "request_inputs": dict(record.inputs),
        "response_timestamps": list(record.response_timestamps),
        "response_outputs": [dict(outputs) for outputs in record.outputs],
    }
