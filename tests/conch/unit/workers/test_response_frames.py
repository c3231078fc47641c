"""Responses of senders reach the server in order, in few packets if they are sent together."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conch.unit.workers.test_response_writer import BATCH, Sides, told
from tests.support.waiting import PATIENCE_S
from tests.support.workers import request_of

from conch.core.errors import InternalError
from conch.core.request import InferenceResponse
from conch.core.tensor import Tensor
from conch.ipc.channel import Kind
from conch.ipc.codec import FINAL, decode_responses, encode_requests, number_of
from conch.ipc.response_credit import WINDOW
from conch.workers.host import response_frames
from conch.workers.host.hosted_requests import HostedRequest
from conch.workers.host.response_frames import MOST_RESPONSES

STREAMS = 32


class Streams:
    """The open requests of a decoupled model in a worker, and what the server gets of them."""

    def __init__(self, tmp_path: Path, count: int) -> None:
        self.sides = Sides(tmp_path, decoupled=True)
        requests = [request_of(f"r{index}", IN=np.zeros(1, np.float32))[0] for index in range(count)]
        payload = self.sides.server.pack([list(each.inputs.values()) for each in requests])
        fields, texts = encode_requests(requests)
        self.sides.server.send(Kind.EXECUTE, BATCH, fields, payload, texts)
        batch = self.sides.writer.requests.batch(BATCH, self.sides.worker.receive())
        self.hosted = [each for each in batch.requests if isinstance(each, HostedRequest)]

    def frames(self) -> Iterator[list[tuple[int, InferenceResponse | None, int]]]:
        """The packets that have arrived: number, response and flags of each response."""
        while self.sides.server.channel.ready(0):
            received = self.sides.server.receive()
            assert received.kind is Kind.RESPONSES
            read = decode_responses(received)
            assert read.numbers is not None and read.flags is not None
            yield list(zip(read.numbers, read.responses, read.flags, strict=True))


@contextmanager
def streams(tmp_path: Path, count: int = STREAMS) -> Iterator[Streams]:
    made = Streams(tmp_path, count)
    try:
        yield made
    finally:
        made.sides.close()


def word(text: str) -> InferenceResponse:
    return InferenceResponse([Tensor.from_array("OUT", np.array([text.encode()], object))])


def floats(count: int) -> InferenceResponse:
    return InferenceResponse([Tensor.from_array("OUT", np.arange(count, dtype=np.float32))])


RESPONSES = st.one_of(
    st.none(),
    st.text(max_size=9).map(word),
    st.sampled_from([0, 1, 2, 3, 2000, 9000, 20_000]).map(floats),
    st.just(InferenceResponse([])),
    st.text(max_size=9).map(lambda text: InferenceResponse([], InternalError(text))),
    st.integers().map(lambda value: InferenceResponse(floats(1).outputs, None, {"value": value})),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sent=st.lists(st.tuples(st.integers(0, 3), RESPONSES), max_size=WINDOW // 24))
def test_the_responses_of_a_turn_come_back_as_they_are(
    tmp_path: Path, sent: list[tuple[int, InferenceResponse | None]]
) -> None:
    with streams(tmp_path, 4) as made:

        async def turn() -> None:
            for index, response in sent:
                made.hosted[index].respond(response, False)
            for hosted in made.hosted:
                hosted.respond(None, True)

        asyncio.run(turn())
        read = [each for frame in made.frames() for each in frame]
        expected = [(number_of(BATCH, index), told(response), 0) for index, response in sent]
        expected += [(number_of(BATCH, index), None, FINAL) for index in range(4)]
        assert [(number, told(response), flags & FINAL) for number, response, flags in read] == expected


def test_a_step_of_many_streams_is_one_packet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_frames, "monotonic_ns", lambda: 0)  # turns that take no time
    with streams(tmp_path) as made:

        async def stream(hosted: HostedRequest, words: asyncio.Queue[str]) -> None:
            while text := await words.get():
                hosted.respond(word(text), False)
            hosted.respond(None, True)

        async def engine() -> list[int]:
            queues = [asyncio.Queue[str]() for _ in made.hosted]
            running = [asyncio.ensure_future(stream(*each)) for each in zip(made.hosted, queues, strict=True)]
            counts: list[int] = []
            for step in range(20):
                for queue in queues:
                    queue.put_nowait(f"word {step}")
                await asyncio.sleep(0)  # streams
                await asyncio.sleep(0)  # the end of their turn
                packets = list(made.frames())
                assert sum(map(len, packets)) == STREAMS
                counts.append(len(packets))
            for queue in queues:
                queue.put_nowait("")
            await asyncio.gather(*running)
            return counts

        counts = asyncio.run(engine())
        assert counts == [2] + [1] * 19, "one each, but for the first response of all"


def test_a_single_response_is_written_before_its_coroutine_goes_on(tmp_path: Path) -> None:
    with streams(tmp_path, 1) as made:

        async def stream() -> None:
            for number in range(5):
                made.hosted[0].respond(word(str(number)), False)
                assert [len(frame) for frame in made.frames()] == [1]
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        asyncio.run(stream())


def test_a_coroutine_that_blocks_its_loop_does_not_hold_its_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It computes for 5 ms before each response.
    monkeypatch.setattr(response_frames, "monotonic_ns", count(0, 5_000_000).__next__)
    with streams(tmp_path, 1) as made:

        async def stream() -> None:
            for number in range(10):
                made.hosted[0].respond(word(str(number)), False)
            assert sum(map(len, made.frames())) == 10

        asyncio.run(stream())


@pytest.mark.parametrize(("apart_ns", "frames"), [(50_000, [1, 20]), (100_000, [1] * 21)])
def test_quick_rows_of_a_thread_share_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_ns: int, frames: list[int]
) -> None:
    times = count(10**9, apart_ns)
    now = next(times)
    monkeypatch.setattr(response_frames, "monotonic_ns", lambda: now)
    monkeypatch.setattr(response_frames, "HELD_NS", int(PATIENCE_S * 1e9))
    with streams(tmp_path, 1) as made:
        for number in range(20):
            made.hosted[0].respond(word(str(number)), False)
            now = next(times)
        made.hosted[0].respond(None, True)
        sent = list(made.frames())
        assert [len(frame) for frame in sent] == frames
        texts = [told(response) for frame in sent for _, response, _ in frame if response is not None]
        assert texts == [told(word(str(number))) for number in range(20)]


def test_a_row_that_stops_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_frames, "monotonic_ns", lambda: 10**9)
    with streams(tmp_path, 1) as made:
        for size in range(1, 9):  # awake before, or asleep
            for number in range(size):
                made.hosted[0].respond(word(str(number)), False)
            arrived = 0
            while arrived < size:
                assert made.sides.server.channel.ready(PATIENCE_S)
                arrived += sum(map(len, made.frames()))
            assert arrived == size


def test_a_frame_holds_a_bounded_number_of_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_frames, "monotonic_ns", lambda: 0)
    with streams(tmp_path, 2) as made:

        async def turn() -> None:
            for number in range(WINDOW):
                for hosted in made.hosted:
                    hosted.respond(word(str(number)), False)

        asyncio.run(turn())
        sizes = [len(frame) for frame in made.frames()]
        assert sum(sizes) == 2 * WINDOW
        # Three, and more where the machine makes the turn long.
        assert max(sizes) <= MOST_RESPONSES and len(sizes) < WINDOW // 2


def test_the_responses_of_each_request_stay_in_order_whatever_threads_send(tmp_path: Path) -> None:
    with streams(tmp_path, 8) as made:
        read: dict[int, list[int]] = defaultdict(list)
        start = threading.Barrier(8)

        def send(hosted: HostedRequest) -> None:
            start.wait(PATIENCE_S)
            for number in range(WINDOW):
                hosted.respond(floats(number + 1 if number % 10 else 20_000 + number), False)
                hosted.granted += 24  # as if the server had
            hosted.respond(None, True)

        threads = [threading.Thread(target=send, args=(hosted,)) for hosted in made.hosted]
        for thread in threads:
            thread.start()
        finals = 0
        while finals < 8:
            assert made.sides.server.channel.ready(PATIENCE_S)
            for frame in made.frames():
                for number, response, flags in frame:
                    finals += flags & FINAL != 0
                    if response is not None:
                        read[number].append(response.outputs[0].shape[0] % 20_000)
        for thread in threads:
            thread.join(PATIENCE_S)
        expected = [number + 1 if number % 10 else number for number in range(WINDOW)]
        assert list(read.values()) == [expected] * 8


def test_rows_that_begin_at_once_have_one_thread_that_flushes(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            with streams(tmp_path, 8) as made:
                start = threading.Barrier(8)

                def send(hosted: HostedRequest, start: threading.Barrier = start) -> None:
                    start.wait(PATIENCE_S)
                    for number in range(6):
                        hosted.respond(word(str(number)), False)

                threads = [threading.Thread(target=send, args=(hosted,)) for hosted in made.hosted]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(PATIENCE_S)
                assert [each.name for each in threading.enumerate()].count("conch-flusher") <= 1
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("size", [1, 20_000])
def test_a_model_may_use_its_arrays_again(tmp_path: Path, size: int) -> None:
    with streams(tmp_path, 1) as made:

        async def turn() -> None:
            array = np.zeros(size, np.float32)
            for number in range(3):
                array[:] = number
                made.hosted[0].respond(InferenceResponse([Tensor.from_array("OUT", array)]), False)

        asyncio.run(turn())
        outputs = [response.outputs[0] for frame in made.frames() for _, response, _ in frame if response]
        assert [(output.numpy() == number).all() for number, output in enumerate(outputs)] == [True] * 3
