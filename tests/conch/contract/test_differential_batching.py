"""The dynamic batcher of a real Triton and ours, with queues in the same state.

A model's only instance is held up until its queue is full, which the refusal of one more request tells. So
both servers form batches of the same waiting requests, whatever the speed of anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.conch.contract.test_batching import TWO_INSTANCES, probe_request, send
from tests.support.peers import NEEDS_TRITON, ready, text_of, triton_serving
from tests.support.servers import RawClient, eventually, serving, write_probe
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON

LONG_US = 1_000_000
"""A queue delay that does not end while a queue is being filled."""


@dataclass(frozen=True)
class Queue:
    """Requests that wait when the instance becomes free, and the settings they wait under."""

    rows: tuple[int, ...]
    preferred: tuple[int, ...] = ()
    delay_us: int = 0

    @property
    def settings(self) -> str:
        preferred = f"preferred_batch_size: {list(self.preferred)}" if self.preferred else ""
        policy = f"default_queue_policy {{ max_queue_size: {len(self.rows)} }}"
        return f"{preferred} max_queue_delay_microseconds: {self.delay_us} {policy}"


QUEUES = {
    "whatever_waits": Queue((1,) * 7),
    "more_than_fits": Queue((1,) * 11),
    "largest_preferred": Queue((1,) * 7, (2, 4)),
    "below_preferred": Queue((1,) * 3, (4,)),
    "preferred_reached": Queue((1,) * 5, (2, 6)),
    "delay_for_the_rest": Queue((1,) * 7, (4,), LONG_US),
    "delay_below_preferred": Queue((1,) * 3, (4,), LONG_US),
    "delay_until_full": Queue((1,) * 8, (), LONG_US),
    "rows_of_many": Queue((3,) * 4),
    "rows_past_preferred": Queue((3,) * 3, (4,)),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RawClient]]:
    """Clients of both servers, which serve the same models."""
    repository = tmp_path_factory.mktemp("both")
    for name, queue in QUEUES.items():
        write_probe(repository, name, f"dynamic_batching {{ {queue.settings} }}")
    write_probe(repository, "ordered", f"dynamic_batching {{ preserve_ordering: true }} {TWO_INSTANCES}")
    policy = "timeout_action: {} default_timeout_microseconds: 20000 allow_timeout_override: true"
    for action in ("REJECT", "DELAY"):
        settings = f"dynamic_batching {{ default_queue_policy {{ {policy.format(action)} }} }}"
        write_probe(repository, f"timeout_{action}", settings)
    with (
        serving(repository) as server,
        closing(RawClient(server.address)) as conch,
        triton_serving(repository) as triton,
    ):
        assert ready(conch)
        yield {"conch": conch, "triton": triton}


def rows_request(model: str, rows: int, **parameters: str) -> Any:
    request = probe_request(model, **parameters)
    request.inputs[0].shape[0] = rows
    request.raw_input_contents[0] = np.zeros(rows, np.float32).tobytes()
    return request


def statistics(client: RawClient, model: str) -> Any:
    (stats,) = client("ModelStatistics", service_pb2.ModelStatisticsRequest(name=model)).model_stats
    return stats


def outcome(call: Any) -> Any:
    """End of a call: ``OK``, or the code and text of its error."""
    try:
        call.result()
    except grpc.RpcError:
        return call.code().name, text_of(call)
    return "OK"


def run(client: RawClient, name: str, files: Path) -> tuple[dict[int, int], list[Any], Any]:
    """The executions by batch size, how the calls ended, and how the one too many was refused."""
    queue = QUEUES[name]
    started, go = files / "started", files / "go"
    first = send(client, probe_request(name, started=str(started), wait_for=str(go)))
    eventually(started.exists, "the model runs")
    rows = max(queue.rows)
    assert queue.rows == (rows,) * len(queue.rows), "any of them may be the one that is refused"
    calls = [send(client, rows_request(name, rows)) for _ in range(len(queue.rows) + 1)]
    eventually(lambda: any(call.done() for call in calls), "one is refused")
    (refused,) = (call for call in calls if call.done())
    go.touch()
    outcomes = [outcome(call) for call in (first, *calls) if call is not refused]
    # Triton counts a batch after it has answered it.
    total = sum(queue.rows) + 1
    eventually(lambda: statistics(client, name).inference_count == total, "everything is counted")
    batches = {row.batch_size: row.compute_infer.count for row in statistics(client, name).batch_stats}
    return batches, outcomes, outcome(refused)


@pytest.mark.parametrize("name", QUEUES)
def test_the_same_batches(both: dict[str, RawClient], tmp_path: Path, name: str) -> None:
    results = {}
    for server, client in both.items():
        (tmp_path / server).mkdir()
        results[server] = run(client, name, tmp_path / server)
    assert results["conch"] == results["triton"]
    assert results["conch"][1] == ["OK"] * (len(QUEUES[name].rows) + 1)


@pytest.mark.parametrize("server", ["conch", "triton"])
def test_order_is_preserved(both: dict[str, RawClient], tmp_path: Path, server: str) -> None:
    client = both[server]
    started, go = tmp_path / "started", tmp_path / "go"
    first = send(client, probe_request("ordered", started=str(started), wait_for=str(go)))
    eventually(started.exists, "one instance is busy")
    later = [send(client, probe_request("ordered")) for _ in range(3)]
    eventually(lambda: statistics(client, "ordered").inference_count == 3, "the other has run the rest")
    assert not any(call.done() for call in later)
    go.touch()
    assert [outcome(call) for call in (first, *later)] == ["OK"] * 4


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
def test_the_same_end_of_a_queue_timeout(both: dict[str, RawClient], tmp_path: Path, action: str) -> None:
    ends = {}
    model = f"timeout_{action}"
    for server, client in both.items():
        started, go = tmp_path / f"{server}-started", tmp_path / f"{server}-go"
        first = send(client, probe_request(model, started=str(started), wait_for=str(go)))
        eventually(started.exists, "the model runs")
        request = probe_request(model)
        request.id = "late"
        late = send(client, request)
        if action == "REJECT":
            eventually(late.done, "it expires while the instance is busy")
        go.touch()
        ends[server] = [outcome(first), outcome(late)]
    assert ends["conch"] == ends["triton"]
