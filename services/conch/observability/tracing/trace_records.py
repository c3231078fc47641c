"""Renders a tree of traces as the records of Triton's trace file.

A trace is a header, its stamps by time, and its tensors after `QUEUE_START`; its subrequests follow.
Triton's summary refuses a stage that ends before it starts, so stamps that depend on each other are clamped:
clocks of threads and workers may disagree by a little.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter

from conch.core.errors import ConchError
from conch.core.request import RunTimes
from conch.core.tensor import ELEMENT_SIZES, decode_bytes
from conch.observability.tracing.trace import TensorRecord, Trace

_FRONT_ENDS = {
    "http": ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"),
    "grpc": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"),
}
_FRONT_ENDS["grpc-stream"] = _FRONT_ENDS["grpc"]
_CHAIN = (
    "",
    "",
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
)
"""Stamps that follow each other; the first two are the front end's."""

_CHAINS = {names: (*names[:2], *_CHAIN[2:]) for names in _FRONT_ENDS.values()}
_DID_NOT_RUN = RunTimes(0, 0)
_BY_TIME = itemgetter(1)
_FLOATS = {"FP32": "f", "FP64": "d"}
_INTEGERS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
}


def tree_text(root: Trace) -> str:
    """The records of a tree, separated by commas; empty if its setting traces none of what it has."""
    values = root.setting.values
    return ",".join(_records(root, values.timestamps, values.tensors))


def stamps(trace: Trace) -> list[tuple[str, int]]:
    """Names and nanoseconds of what is known of a trace's times, in the order of time."""
    front_end = _FRONT_ENDS.get(trace.protocol) if trace.over_network else None
    received = read = 0
    if front_end is not None:
        # The summary needs both: a time that is unknown is that of its neighbour.
        received = trace.received_ns or trace.read_ns or trace.started_ns
        read = trace.read_ns or received
    times = trace.times or _DID_NOT_RUN
    # Requests of a decoupled model end one by one, and may end before or after their batch.
    end = times.end_ns or (times.start_ns and trace.ended_ns)
    chain = (
        received,
        read,
        trace.started_ns,
        trace.queued_ns,
        times.start_ns,
        times.input_end_ns,
        times.output_start_ns or end,
        end,
        trace.ended_ns,
    )
    names = _CHAIN if front_end is None else _CHAINS[front_end]
    found = [
        (name, latest) for name, ns, latest in zip(names, chain, accumulate(chain, max), strict=True) if ns
    ]
    # Responses and sends overlap the end of the request and of its batch.
    arrived = max(received, read)
    latest = max(trace.started_ns, arrived)
    if trace.responded_ns and trace.parent is None:
        found.append(("INFER_RESPONSE_COMPLETE", max(trace.responded_ns, latest)))
    if front_end is not None:
        latest = arrived
        sends = trace.sends
        for start, end in zip(sends[::2], sends[1::2], strict=False):  # a send may not have ended
            if start and end:
                latest = max(latest, start)
                found.append((front_end[2], latest))
                latest = max(latest, end)
                found.append((front_end[3], latest))
    found.sort(key=_BY_TIME)  # stable: equal times keep the order of events
    return found


def _records(trace: Trace, timestamps: bool, tensors: bool) -> Iterator[str]:
    number = trace.number
    made = [_tensor_text(number, each) for each in trace.tensors] if tensors else []
    if timestamps:
        request_id = f',"request_id":{json.dumps(trace.request_id)}' if trace.request_id else ""
        parent_id = f',"parent_id":{trace.parent.number}' if trace.parent is not None else ""
        model = json.dumps(trace.model)
        yield (
            f'{{"id":{number},"model_name":{model},"model_version":{trace.version}{request_id}{parent_id}'
            f"{_route_text(trace)}}}"
        )
        for name, ns in stamps(trace):
            yield f'{{"id":{number},"timestamps":[{{"name":"{name}","ns":{ns}}}]}}'
            if name == "QUEUE_START":
                yield from made
                made = []
    yield from made
    for child in trace.children:
        yield from _records(child, timestamps, tensors)


def _route_text(trace: Trace) -> str:
    """Fields of a request that a route has given its version."""
    return "".join(f',"{name}":{json.dumps(value)}' for name, value in route_attributes(trace).items())


def route_attributes(trace: Trace) -> dict[str, str | int]:
    """Attributes of the rule by which a route chose the version, and of its rollout; none without a route."""
    if trace.side is None:
        return {}
    _, by, rollout = trace.side
    return {"conch.route.by": by, "conch.rollout.id": rollout} if rollout else {"conch.route.by": by}


def _tensor_text(number: int, tensor: TensorRecord) -> str:
    content = {
        "name": tensor.name,
        "data": _data_text(tensor),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }
    text = json.dumps(content, separators=(",", ":"))
    return f'{{"id":{number},"activity":"{tensor.activity}","tensor":{text}}}'


def _data_text(tensor: TensorRecord) -> str:
    """The elements as a C++ stream writes them; BYTES as CSV; empty if they can't be read."""
    datatype, data = tensor.datatype, tensor.data
    try:
        if datatype == "BYTES":
            texts = (each.decode(errors="backslashreplace") for each in decode_bytes(data))
            return ",".join('"' + text.replace('"', '""') + '"' for text in texts)
        code = _FLOATS.get(datatype) or _INTEGERS.get(datatype)
        if code is None:  # 16-bit floats have no text in Triton either
            return ""
        elements = struct.unpack(f"<{len(data) // ELEMENT_SIZES[datatype]}{code}", data)
    except (ConchError, struct.error):
        return ""
    if datatype in _FLOATS:
        return ",".join([format(element, "g") for element in elements])
    return ",".join([str(int(element)) for element in elements])
