"""Descriptors that blocks and files of messages take, and what a process without free ones loses."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conch.unit.workers.models import CalledServer, floats, source_of, spec_of
from tests.conch.unit.workers.test_open_requests import STREAM
from tests.support.servers import eventually
from tests.support.workers import Running, SlowClient, batch_of, request_of, worker

from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import Tensor
from conch.ipc.blocks import MOST_IDLE, MOST_LENT

pytestmark = pytest.mark.process

MODEL = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
how = requests[0].request_id()
large = pb_utils.Tensor("OUT", np.arange(100_000, dtype=np.float32))
if how == "outputs":
    return [pb_utils.InferenceResponse([large])]
if how == "parameters":
    small = pb_utils.Tensor("OUT", array)
    return [pb_utils.InferenceResponse([small], parameters={"p": "x" * 100_000})]
if how == "a sender":
    sender = requests[0].get_response_sender()
    sender.send(pb_utils.InferenceResponse([large]), 1)
    return [None]
if how == "a call":
    call = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("IN", large.as_numpy())], ["OUT"], "other")
    for response in call.exec(decoupled=True):
        if response.has_error():
            raise ValueError(response.error().message())
if how == "an answer":
    call = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("IN", array)], ["OUT"], "large")
    for response in call.exec(decoupled=True):
        if response.has_error():
            raise ValueError(response.error().message())
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""


class LargeServer(CalledServer):
    """A server whose other model answers with more than a message holds."""

    def find(self, request: InferenceRequest) -> Any:
        request.model_name = "other"
        return super().find(request)

    def submit(
        self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
    ) -> None:
        output = Tensor.from_array("OUT", np.ones(100_000, np.float32))
        request.respond(InferenceResponse([output]), True)


@contextmanager
def no_free_descriptors(pid: int = 0) -> Iterator[None]:
    """A process can't open anything while this lasts."""
    listing = os.open(f"/proc/{pid or 'self'}/fd", os.O_RDONLY)
    used = {int(number) for number in os.listdir(listing)} - ({listing} if not pid else set())
    os.close(listing)
    lowest_free = next(number for number in range(len(used) + 1) if number not in used)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def outcome(running: Running, how: str, size: int, batches: list[Batch]) -> str:
    """The error of a request, or none; takes down its batch."""
    request, answers = request_of(how, IN=floats(size))
    batches.append(batch_of(request))
    try:
        (response,) = running.start(batches[-1]).result()
    except ConchError as error:
        return error.message
    if response is None:
        assert answers.wait(1)
        response = answers.calls[0][1]
    assert response is not None
    return "" if response.error is None else response.error.message


@pytest.mark.parametrize(
    ("how", "size", "in_worker"),
    [
        ("outputs", 4, False),
        ("parameters", 4, False),
        ("a sender", 4, False),
        ("a call", 4, False),
        ("inputs", 100_000, True),
        ("an answer", 4, True),
    ],
)
def test_without_descriptors_a_request_fails_and_the_worker_goes_on(
    tmp_path: Path, how: str, size: int, in_worker: bool
) -> None:
    batches: list[Batch] = []
    with worker(spec_of(tmp_path, source_of(MODEL)), LargeServer()) as running:
        assert outcome(running, "", 4, batches) == ""
        with no_free_descriptors(running.process.pid if in_worker else 0):
            for _ in range(2):
                assert "can't be mapped" in outcome(running, how, size, batches)
                assert outcome(running, "", 4, batches) == ""
        for _ in range(3):
            assert outcome(running, how, size, batches) == ""
        assert running.process.poll() is None and not running.lost
        assert not any(running.link.open_requests_of(batch) for batch in batches)


def test_slow_clients_hold_a_bounded_number_of_descriptors(tmp_path: Path) -> None:
    def blocks() -> list[str]:
        links = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{number}"))
        return [link for link in links if "conch-tensors" in link]

    with worker(spec_of(tmp_path, source_of(STREAM), decoupled=True)) as running:
        clients = [SlowClient() for _ in range(20)]
        batches = []
        array = np.array([60, 20_000], np.float32)
        for client in clients:
            batches.append(batch_of(client.request(IN=array)))
            running.start(batches[-1]).result()
        # All have sent as much as they may: each 80 KB cost 13 of 96 units.
        eventually(lambda: all(len(client.calls) >= 7 for client in clients), "all wait")
        assert len(blocks()) <= MOST_LENT + MOST_IDLE
        for client in clients:
            client.read()
        assert all(client.wait(1) for client in clients)
        for client in clients:
            arrays = [response.outputs[0].numpy() for _, response, _ in client.calls if response is not None]
            assert [array[0] for array in arrays] == list(range(60))
