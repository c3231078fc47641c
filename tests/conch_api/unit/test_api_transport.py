"""URLs, configs and errors in clients; the way of responses to their readers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import (
    ERRORS_BY_CODE,
    ConchError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownError,
)
from conch.core.request import InferenceRequest, InferenceResponse
from conch_api.client_common import Signature, Url, as_error
from conch_api.response_queue import MOST_KEPT, ResponseQueue, raise_error

GRPC_NAMES = {
    1: "CANCELLED",
    2: "UNKNOWN",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    11: "OUT_OF_RANGE",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    16: "UNAUTHENTICATED",
}


class Failed(Exception):
    """As tritonclient's exception."""

    def __init__(self, text: str, status: str | None) -> None:
        self.message = lambda: text
        self.status = lambda: status


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("host:1", Url(True, False, "host:1")),
        ("grpc://host:1", Url(True, False, "host:1")),
        ("grpcs://host:1/", Url(True, True, "host:1")),
        ("http://host:1", Url(False, False, "host:1")),
        ("https://host:1/", Url(False, True, "host:1")),
    ],
)
def test_urls(text: str, url: Url) -> None:
    assert Url.parse(text) == url


@pytest.mark.parametrize("text", ["", "ftp://x", "http://"])
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"url '{text}' must be"):
        Url.parse(text)


@pytest.mark.parametrize("error", ERRORS_BY_CODE.values())
def test_errors_come_back_as_the_server_raised_them(error: type[ConchError]) -> None:
    found = as_error(Failed("text", f"StatusCode.{GRPC_NAMES[error.grpc_status]}"))
    assert type(found) is error
    assert found.message == "text"
    over_http = as_error(Failed("text", str(error.http_status)))
    assert over_http is not None
    assert over_http.http_status == error.http_status


def test_other_errors() -> None:
    assert isinstance(as_error(ConnectionRefusedError("no")), UnavailableError)
    assert isinstance(as_error(Failed("Deadline Exceeded", None)), DeadlineExceededError)
    assert isinstance(as_error(Failed("what", "999")), UnknownError)
    assert as_error(ValueError("mine")) is None
    gone = AioRpcError(StatusCode.UNAVAILABLE, Metadata(), Metadata(), "gone")
    found = as_error(gone)  # as a stream of the asynchronous client raises it
    assert isinstance(found, UnavailableError)
    assert found.message == "gone"


def test_a_signature_gives_inputs_their_types() -> None:
    config: dict[str, Any] = {
        "name": "m",
        "max_batch_size": 4,
        "input": [
            {"name": "A", "data_type": "TYPE_INT32", "dims": ["2"]},
            {"name": "B", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
        ],
    }
    signature = Signature(config)
    (datatype, array) = signature.arrays([[1, 2]], {}, sample=True)["A"]
    assert (datatype, array.dtype, array.shape) == ("INT32", np.dtype(np.int32), (1, 2))
    found = signature.arrays((), {"A": np.zeros((1, 2)), "B": np.array([["x"]])}, sample=False)
    assert found["A"][1].dtype == np.float64  # an array is what it is
    assert (found["B"][0], found["B"][1].dtype) == ("BYTES", np.dtype(object))
    assert not Signature({**config, "max_batch_size": 0}).batches


def request() -> InferenceRequest:
    return InferenceRequest("m", "", {}, lambda *_: None, 0)


@given(st.integers(0, MOST_KEPT))
def test_responses_come_in_order_and_end(count: int) -> None:
    handover = ResponseQueue()
    sent = [InferenceResponse([]) for _ in range(count)]
    for response in sent:
        handover.put(request(), response, False)
    handover.put(request(), None, True) if count < MOST_KEPT else None
    assert [handover.take() for _ in range(count)] == sent
    if count < MOST_KEPT:
        assert handover.take() is None
        assert handover.over
    else:
        with pytest.raises(DeadlineExceededError):
            handover.take(0.0)


def test_a_model_waits_for_its_reader_until_there_is_none() -> None:
    handover = ResponseQueue()
    for _ in range(MOST_KEPT):
        handover.put(request(), InferenceResponse([]), False)
    late = request()
    late.reader = handover
    writer = threading.Thread(target=late.wait_until_writable)
    writer.start()
    handover.close()
    writer.join()
    handover.put(late, InferenceResponse([]), False)
    assert late.is_abandoned(0)
    assert handover.take() is None


def test_a_stop_takes_nothing_from_who_has_been_answered() -> None:
    handover, open_one, read = ResponseQueue(), ResponseQueue(), ResponseQueue()
    response = InferenceResponse([])
    for one in (handover, open_one):
        one.put(request(), response, one is handover)
        one.stop()
    assert handover.take() is response
    assert handover.take() is None
    with pytest.raises(UnavailableError, match="the server has been stopped"):
        open_one.take()
    read.close()
    read.stop()
    assert read.take() is None  # its reader knows


def test_each_caller_gets_an_error_of_its_own() -> None:
    class Special(ResourceExhaustedError):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(one + two)

    error = Special("too ", "much")
    error.retry_after_ms = 7
    with pytest.raises(ResourceExhaustedError, match="too much") as raised:
        raise_error(InferenceResponse([], error))
    assert raised.value is not error
    assert raised.value.retry_after_ms == 7
    raise_error(InferenceResponse([]))
