"""Frames that a client of HTTP/2 floods a server with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.attacks import STREAM
from tests.support.http2_peer import (
    ACK,
    END_HEADERS,
    END_STREAM,
    MAX_WINDOW,
    Setting,
    call,
    call_pairs,
    continuation,
    data,
    frame,
    header_block,
    headers,
    integer,
    ping,
    priority,
    reset,
    settings,
    window_update,
)

AT_ONCE = 200
"""Frames that are sent together."""

BLOCK = header_block(*call_pairs(STREAM))
OPEN = headers(1, BLOCK)
BOTH = ("grpcio", "own")
OWN = ("own",)

ANSWER = 1 << 20
LARGE_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
LARGE = f"""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros({ANSWER}, np.uint8))])
            for request in requests
        ]
"""


def streams_of(number: int, count: int = AT_ONCE) -> range:
    """The ids of one round's streams."""
    return range(2 * count * number + 1, 2 * count * (number + 1), 2)


def on_each_stream(make: Callable[[int], bytes]) -> Callable[[int], bytes]:
    return lambda number: b"".join(make(stream) for stream in streams_of(number))


def after(first: bytes, again: bytes, count: int = AT_ONCE) -> Callable[[int], bytes]:
    return lambda number: first if number == 0 else again * count


@dataclass(frozen=True, slots=True)
class Flood:
    """Rounds of frames.

    Attributes:
        frames: The frames of a round, by its number.
        ended_by: Transports that end the connection; others have to bound what the flood takes.
        rounds: Number of rounds, unless the connection ends before.
        reads: True if the client reads what the server sends.
        acknowledges: True if the client acknowledges the server's settings.
    """

    frames: Callable[[int], bytes]
    ended_by: tuple[str, ...] = OWN
    rounds: int = 500
    reads: bool = True
    acknowledges: bool = True


FLOODS = {
    "streams that stay open": Flood(on_each_stream(lambda stream: headers(stream, BLOCK)), ended_by=()),
    "streams reset at once": Flood(
        on_each_stream(lambda stream: headers(stream, BLOCK) + reset(stream)), ended_by=()
    ),
    # What follows has the server reset streams ("MadeYouReset").
    "windows above 2^31-1": Flood(
        on_each_stream(lambda stream: headers(stream, BLOCK) + 2 * window_update(stream, MAX_WINDOW)),
        ended_by=(),
    ),
    "increments of 0": Flood(
        on_each_stream(lambda stream: headers(stream, BLOCK) + window_update(stream, 0)), ended_by=("grpcio",)
    ),
    "DATA of half-closed streams": Flood(
        on_each_stream(lambda stream: headers(stream, BLOCK, END_HEADERS | END_STREAM) + data(stream, b"x")),
        ended_by=(),
    ),
    "HEADERS of half-closed streams": Flood(
        on_each_stream(lambda stream: 2 * headers(stream, BLOCK, END_HEADERS | END_STREAM)), ended_by=()
    ),
    "PRIORITY of a wrong length": Flood(
        on_each_stream(lambda stream: headers(stream, BLOCK) + priority(stream, bytes(4))), ended_by=()
    ),
    "malformed requests": Flood(
        on_each_stream(lambda stream: headers(stream, BLOCK + header_block(("X-A", "a")))), ended_by=()
    ),
    "empty CONTINUATION": Flood(after(headers(1, BLOCK, 0), continuation(1, b"", 0)), ended_by=BOTH),
    "CONTINUATION": Flood(
        after(headers(1, BLOCK, 0), continuation(1, header_block(("x-a", "a" * 16_000)), 0), 10),
        ended_by=BOTH,
    ),
    "one field thousands of times": Flood(
        lambda number: (
            headers(1, BLOCK + b"\x40\x03x-a" + integer(4000, 7) + b"a" * 4000)
            if number == 0
            else headers(2 * number + 1, BLOCK + integer(62, 7, 0x80) * 12_000)
        ),
        ended_by=BOTH,
        rounds=100,
        acknowledges=False,
    ),
    "table size updates": Flood(
        on_each_stream(lambda stream: headers(stream, b"\x20\x3f\xe1\x1f" * 100 + BLOCK) + reset(stream)),
        ended_by=BOTH,
    ),
    "PING": Flood(after(ping(), ping())),
    "PING of a client that does not read": Flood(after(ping(), ping()), reads=False),
    "SETTINGS": Flood(after(settings(), settings())),
    "SETTINGS of a client that does not read": Flood(after(settings(), settings()), reads=False),
    "SETTINGS of a thousand values": Flood(
        after(b"", settings(*[(Setting.INITIAL_WINDOW_SIZE, size) for size in range(1000)]), 10)
    ),
    "empty DATA": Flood(after(OPEN, data(1))),
    "WINDOW_UPDATE": Flood(after(OPEN, window_update(0, 1) + window_update(1, 1))),
    "PRIORITY": Flood(after(OPEN, priority(1))),
    "RST_STREAM of a closed stream": Flood(after(OPEN, reset(1))),
    "unknown frames": Flood(after(b"", frame(0x16, 0, 0, bytes(8)))),
    "DATA beyond the windows": Flood(
        after(OPEN + data(1, b"\0\x40\0\0\0"), data(1, bytes(16384)), 16), ended_by=()
    ),
    "acknowledgements of PING": Flood(after(b"", ping(flags=ACK))),
    "HEADERS of a closed stream": Flood(after(call(1), headers(1, BLOCK)), ended_by=()),
    "empty messages": Flood(
        on_each_stream(lambda stream: headers(stream, BLOCK) + data(stream, bytes(5 * AT_ONCE), END_STREAM)),
        ended_by=(),
        rounds=5,
    ),
    "DATA of one byte": Flood(after(OPEN + data(1, b"\0\x01\0\0\0"), data(1, b"x")), ended_by=()),
    "cheap calls": Flood(on_each_stream(call), ended_by=()),
    "answered calls reset": Flood(
        on_each_stream(lambda stream: call(stream) + reset(max(1, stream - 2 * AT_ONCE))), ended_by=()
    ),
}
