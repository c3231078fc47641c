"""Live sequences of a load process."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conch.protocol import inference_pb2
from conch_tools.perf.load.ready_requests import InputTensor, ReadyRequest, grpc_request, http_request
from conch_tools.perf.load.sequences import SequencePlan, Sequences

_Seen = tuple[int, int, bool, bool]


def _request(step: int, http: bool) -> ReadyRequest:
    tensors = [InputTensor("IN", "UINT8", (1,), bytes([step]))]
    return http_request(tensors, {"else": 7}, {}) if http else grpc_request("m", "", tensors, {"else": 7}, {})


def _read(request: ReadyRequest) -> _Seen:
    """Value, id, START and END of a request."""
    if request.head_bytes:
        head = json.loads(request.body[: request.head_bytes])
        found: dict[str, Any] = head["parameters"]
        assert found["binary_data_output"] is True
        value = request.body[request.head_bytes :]
    else:
        message = inference_pb2.ModelInferRequest.FromString(request.body)
        found = {
            name: getattr(each, str(each.WhichOneof("parameter_choice")))
            for name, each in message.parameters.items()
        }
        (value,) = message.raw_input_contents
    assert found["else"] == 7
    ends = (bool(found.get(f"sequence_{name}")) for name in ("start", "end"))
    return (value[0], int(found["sequence_id"]), *ends)  # type: ignore[return-value]


@given(st.data(), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 4))
def test_each_sequence_is_whole_and_alone_with_its_id(
    data: st.DataObject, http: bool, text_ids: bool, shares: int, slots: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    streams = [[_request(10 * n + step, http) for step in range(length)] for n, length in enumerate(lengths)]
    plan = SequencePlan(streams, range(5, 5 + slots * shares + 1), text_ids)
    processes = [Sequences(plan, http, slots, share, shares, 1) for share in range(shares)]
    waiting: dict[tuple[int, int], _Seen] = {}
    sent: dict[int, list[_Seen]] = defaultdict(list)  # by id, since its last START
    for number, slot, fails in data.draw(
        st.lists(
            st.tuples(st.integers(0, shares - 1), st.integers(0, slots - 1), st.sampled_from([0, 0, 0, 1])),
            min_size=20,
            max_size=60,
        )
    ):
        process, place = processes[number], (number, slot)
        if place not in waiting:
            seen = waiting[place] = _read(process.next_request(slot))
            assert seen[1] in plan.ids
            assert not any(other[1] == seen[1] for where, other in waiting.items() if where != place)
            if seen[2]:
                sent[seen[1]] = []
            sent[seen[1]].append(seen)
            continue
        seen = waiting.pop(place)
        known = sent[seen[1]]
        assert process.ended(slot, "an error" if fails else "") is (seen[3] and not fails)
        stream = known[0][0] // 10
        # START is on the first request only, END on the last only, and the values are those of one stream.
        assert [(value, start) for value, _, start, _ in known] == [
            (10 * stream + step, not step) for step in range(len(known))
        ]
        assert [end for *_, end in known] == [step + 1 == lengths[stream] for step in range(len(known))]
        if fails:
            waiting[place] = again = _read(process.next_request(slot))
            assert again[:3] == (10 * stream, seen[1], True)
            sent[seen[1]] = [again]
    for number, process in enumerate(processes):
        open_slots = process.unfinished()
        for slot in open_slots:
            assert (number, slot) not in waiting
            assert _read(process.last_request(slot))[3]
            assert process.ended(slot, "")
        assert not process.unfinished()


def test_lengths_vary_about_the_one_that_is_asked_for() -> None:
    plan = SequencePlan([[_request(1, False)]], range(1, 1000), False, 20, 0.2)
    sequences = Sequences(plan, False, 1, 0, 1, 3)
    lengths = []
    for _ in range(300):
        length = 1
        sequences.next_request(0)
        while not sequences.ended(0, ""):
            sequences.next_request(0)
            length += 1
        lengths.append(length)
    assert {min(lengths), max(lengths)} == {16, 24}
    assert 19 < sum(lengths) / len(lengths) < 21
