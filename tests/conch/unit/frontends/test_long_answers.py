"""Answers about many models: as if made in one piece, with pauses for other threads between their pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from conch.core.model_control import IndexEntry
from conch.core.model_statistics import ModelStatistics
from conch.core.statistics_snapshot import VersionStatistics
from conch.frontends import result_objects as results
from conch.frontends.grpc import operation_messages as messages
from conch.frontends.http.json_body import json_list
from conch.frontends.http.routes import operation_json as json
from conch.frontends.yield_gil import on_yield
from conch.protocol import inference_pb2 as pb

ENTRIES = [IndexEntry(f"m[{number}]", "1", "READY", "]", ("a",)) for number in range(250)]
STATISTICS = [VersionStatistics(f"m{number}", 1, ModelStatistics().snapshot()) for number in range(250)]


def grpc_index(entries: list[IndexEntry]) -> tuple[Any, Any]:
    line = pb.RepositoryIndexResponse.ModelIndex
    expected = [line(name=each.name, version="1", state="READY", reason="]") for each in entries]
    return messages.write_index(entries), pb.RepositoryIndexResponse(models=expected)


def grpc_statistics(models: list[VersionStatistics]) -> tuple[Any, Any]:
    expected = [pb.ModelStatistics(**results.statistics_object(each)) for each in models]
    return messages.write_statistics(models), pb.ModelStatisticsResponse(model_stats=expected)


def http_index(entries: list[IndexEntry]) -> tuple[Any, Any]:
    return json_list(entries, json.entry_object), orjson.dumps([json.entry_object(each) for each in entries])


def http_statistics(models: list[VersionStatistics]) -> tuple[Any, Any]:
    return json_list(models, results.statistics_object), orjson.dumps(
        [results.statistics_object(each) for each in models]
    )


@pytest.mark.parametrize("count", [0, 1, 100, 101, 250])
@pytest.mark.parametrize(
    ("write", "items"),
    [
        (grpc_index, ENTRIES),
        (grpc_statistics, STATISTICS),
        (http_index, ENTRIES),
        (http_statistics, STATISTICS),
    ],
)
def test_pieces(write: Callable[[list[Any]], tuple[Any, Any]], items: list[Any], count: int) -> None:
    pauses: list[None] = []
    with on_yield(lambda: pauses.append(None)):
        answer, expected = write(items[:count])
    assert answer == expected
    assert len(pauses) == max(-(-count // 100) - 1, 0)
