"""Requests with tensors in regions: read at first, and recognised afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.core import Answers
from tests.support.profiles import scaled
from tests.support.sharing import in_region, shared_object

from conch.core.admission import Admission
from conch.core.errors import ConchError, InvalidArgumentError, NotFoundError
from conch.core.registry import Registry
from conch.core.request import InferenceRequest, Responder
from conch.frontends.grpc.request_decoder import RequestDecoder
from conch.memory.region_bindings import bind_regions
from conch.memory.regions import Regions
from conch.protocol import inference_pb2 as pb

SIZE = 4096
EDGES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-2, 16),
    st.integers(SIZE - 16, SIZE + 2),
    st.sampled_from([2**31, 2**32, 2**63 - 1, -(2**63)]),
)


@pytest.fixture(scope="module")
def regions() -> Iterator[Regions]:
    with shared_object(3 * SIZE) as memory, closing(Regions()) as regions:
        memory.write(np.tile(np.arange(256, dtype=np.uint8), 3 * SIZE // 256))
        regions.register_system("r", memory.key, SIZE, SIZE)
        yield regions


Decode = Callable[[bytes, Responder, int], InferenceRequest]


def bound_to(regions: Regions) -> Decode:
    """A decoder whose requests are bound to regions, as admission does."""
    decoder = RequestDecoder()

    def decode(message: bytes, responder: Responder, received_ns: int) -> InferenceRequest:
        request = decoder(message, responder, received_ns)
        if request.named_regions is not None:
            try:
                bind_regions(regions, request)
            except ConchError:
                request.discard()
                raise
        return request

    return decode


def users(regions: Regions) -> int:
    return sum(region.users for region in regions.system_regions())


def message_of(*inputs: tuple[str, Any], raw: list[bytes] | None = None, **more: Any) -> Any:
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=raw or [], **more)
    for name, part in inputs:
        tensor = message.inputs.add(name=name, datatype="UINT8", shape=[4])
        if part is not None:
            in_region(tensor.parameters, *part)
    return message


def outcome(decoder: Decode, regions: Regions, message: Any) -> Any:
    """Contents of a request, which is then given up."""
    try:
        request = decoder(message.SerializeToString(), Answers(), 0)
    except ConchError as error:
        return type(error), error.message
    seen = (
        request.id,
        request.requested,
        request.parameters,
        request.priority,
        {name: (one.datatype, one.shape, bytes(one.data)) for name, one in request.inputs.items()},
        users(regions),
    )
    request.discard()
    return seen


@settings(max_examples=scaled(300))
@given(
    parts=st.lists(
        st.one_of(st.none(), st.tuples(st.sampled_from(["r", "s", ""]), EDGES, st.one_of(st.none(), EDGES))),
        max_size=3,
    ),
    raw=st.integers(0, 3),
    place=st.one_of(st.none(), st.tuples(st.sampled_from(["r", "s"]), EDGES, EDGES)),
    custom=st.booleans(),
)
def test_no_part_reaches_beyond_its_region(
    regions: Regions, parts: list[Any], raw: int, place: Any, custom: bool
) -> None:
    """Whatever the numbers are: what is read lies in the region, and both ways to read it agree."""
    message = message_of(*zip("abc", parts, strict=False), raw=[b"1234"] * raw, id="i")
    if place is not None:
        in_region(message.outputs.add(name="o").parameters, *place)
    if custom:
        message.parameters["custom"].bool_param = True
    decoder = bound_to(regions)
    first = outcome(decoder, regions, message)
    assert users(regions) == 0
    for _ in range(2):  # when it has been seen twice, it is recognised
        assert outcome(decoder, regions, message) == first
    # Something that keeps it from being recognised: a parameter of a kind that never repeats.
    message.parameters["x"].string_param = "y"
    whole = outcome(decoder, regions, message)
    assert users(regions) == 0
    if isinstance(first[0], type):
        assert whole == first
        return
    assert whole[4:] == first[4:]
    held = (np.arange(SIZE) % 256).astype(np.uint8).tobytes()
    for name, part in zip("abc", parts, strict=False):
        if part is not None:
            offset = part[2] or 0
            assert 0 <= offset < offset + part[1] <= SIZE
            assert first[4][name][2] == held[offset : offset + part[1]]


def test_a_request_that_is_seen_again_has_the_same_signature(regions: Regions) -> None:
    decoder = bound_to(regions)
    message = message_of(("a", ("r", 4, 8)), ("b", None), raw=[b"1234"])
    in_region(message.outputs.add(name="o").parameters, "r", 4)
    signatures = set()
    for number in range(3):
        message.id = str(number)
        request = decoder(message.SerializeToString(), Answers(), 0)
        assert [bytes(tensor.data) for tensor in request.inputs.values()] == [bytes([8, 9, 10, 11]), b"1234"]
        assert (request.id, request.requested) == (str(number), ("o",))
        signatures.add(request.signature)
        request.discard()
    assert len(signatures) == 1
    assert None not in signatures
    # Another place is another request.
    in_region(message.inputs[0].parameters, "r", 4, 12)
    other = decoder(message.SerializeToString(), Answers(), 0)
    assert other.signature not in signatures
    assert bytes(other.inputs["a"].data) == bytes([12, 13, 14, 15])
    other.discard()


def test_a_request_that_was_good_is_looked_at_again(regions: Regions) -> None:
    decoder = bound_to(regions)
    with shared_object(64) as memory:
        message = message_of(("a", ("t", 4, 60))).SerializeToString()
        for size, error in ((64, None), (None, NotFoundError), (32, InvalidArgumentError), (64, None)):
            if size is not None:
                regions.register_system("t", memory.key, 0, size)
            if error is None:
                decoder(message, Answers(), 0).discard()
            else:
                with pytest.raises(error):
                    decoder(message, Answers(), 0)
            regions.unregister_system("t")


def test_an_empty_input_beside_one_in_a_region_needs_no_contents(regions: Regions) -> None:
    message = message_of(("a", ("r", 4)), ("b", None))
    message.inputs[1].shape[:] = [0]
    decoder = bound_to(regions)
    for _ in range(2):
        request = decoder(message.SerializeToString(), Answers(), 0)
        assert request.inputs["b"].data == b""
        request.discard()
    message.inputs[1].shape[:] = [1]
    with pytest.raises(InvalidArgumentError, match="unable to find data for input tensor 'b'"):
        decoder(message.SerializeToString(), Answers(), 0)
    assert users(regions) == 0


def test_a_refused_request_releases_its_regions(regions: Regions) -> None:
    admission = Admission(Registry(), bind=partial(bind_regions, regions))
    request = RequestDecoder()(message_of(("a", ("r", 4))).SerializeToString(), Answers(), 0)
    with pytest.raises(NotFoundError) as refused:
        admission.admit(request)
    assert users(regions) == 1
    admission.refuse(request, refused.value, None, 0, 0)
    assert users(regions) == 0
