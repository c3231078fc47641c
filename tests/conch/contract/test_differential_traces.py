"""The same requests, traced by a real Triton and by conch: what is recorded must be the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as triton
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.support.otlp_collector import http_collector
from tests.support.peers import NEEDS_TRITON, triton_serving
from tests.support.servers import WAIT_S, free_port, serving_process
from tests.support.traced_models import CALLER, records, write_models
from tritonclient.utils import InferenceServerException

pytestmark = NEEDS_TRITON

CHANNEL = [("grpc.use_local_subchannel_pool", 1)]
_NAMES = ("model_name", "model_version", "trace_id", "trace_parent_id", "request_id")
TRITONS = {f"triton.{name}" for name in _NAMES}
Stamps = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Addresses:
    http: str
    grpc: str


def ask(
    protocol: str,
    model: str,
    number: int,
    request_id: str,
    at: Addresses,
    headers: dict[str, str] | None = None,
) -> None:
    """One request; its errors are no matter."""
    if protocol == "http":
        tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [number]}
        body = {"id": request_id, "inputs": [tensor]} if request_id else {"inputs": [tensor]}
        httpx.post(f"http://{at.http}/v2/models/{model}/infer", json=body, headers=headers)
        return
    given = triton.InferInput("IN", [1], "INT32")
    given.set_data_from_numpy(np.array([number], np.int32))
    client = triton.InferenceServerClient(at.grpc, channel_args=CHANNEL)
    with client, suppress(InferenceServerException):
        client.infer(model, [given], request_id=request_id, headers=headers)


def stream(responses: int, at: Addresses) -> None:
    """A request of a model that answers with some responses."""
    answers: SimpleQueue[Any] = SimpleQueue()
    with triton.InferenceServerClient(at.grpc, channel_args=CHANNEL) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        given = triton.InferInput("IN", [1], "INT32")
        given.set_data_from_numpy(np.array([responses], np.int32))
        client.async_stream_infer("many", [given], enable_empty_final_response=True)
        for _ in range(responses + 1):
            assert not isinstance(answers.get(timeout=WAIT_S), Exception)
        client.stop_stream()


CALLERS_SPAN = (8).to_bytes(8, "big")
PARENT = f"00-{7:032x}-{8:016x}-01"
REQUESTS: list[Callable[[Addresses], None]] = [
    *(
        partial(ask, protocol, model, number, request_id)
        for protocol in ("http", "grpc")
        for model, number, request_id in (
            ("leaf", 1, ""),
            ("leaf", 2, "an id"),
            ("leaf", -1, "failed"),
            ("ensemble", 3, ""),
            ("ensemble", -1, "failed in a step"),
            ("caller", 4, "calls"),
        )
    ),
    *(
        partial(ask, protocol, "leaf", 5, "", headers={"traceparent": PARENT})
        for protocol in ("http", "grpc")
    ),
    partial(stream, 3),
    partial(stream, 0),
]


def asked(root: Path, configs: Callable[[str], Sequence[str]]) -> None:
    """Sends all requests, one after another, to Triton and then to conch; `configs` gives their settings."""
    repository = write_models(root / "models")
    # Without the argument, Triton traces no calls of models; conch traces them.
    code = CALLER.replace("inputs=request.inputs()", "inputs=request.inputs(), trace=request.trace()")
    (repository / "caller" / "1" / "model.py").write_text(code)
    for name in ("triton", "conch"):
        grpc, http = free_port(), free_port()
        flags = ["--allow-http=true", f"--http-port={http}"]
        flags += [f"--trace-config={text}" for text in configs(name)]
        with ExitStack() as stack:
            if name == "triton":
                stack.enter_context(triton_serving(repository, *flags, port=grpc))
            else:
                flags.append(f"--grpc-port={grpc}")
                stack.enter_context(serving_process(repository, flags=flags))
            for request in REQUESTS:
                request(Addresses(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"))


def chained(stamps: Stamps) -> list[str]:
    """Names by time; responses and sends, which overlap the end of the request, come last."""
    loose = ("REQUEST_END", "INFER_RESPONSE_COMPLETE", "_SEND_START", "_SEND_END")
    ordered = [name for name, _ in sorted(stamps, key=lambda stamp: stamp[1])]
    tight = [name for name in ordered if not name.endswith(loose)]
    return [*tight, *sorted(name for name in ordered if name.endswith(loose))]


def trees(file: Path) -> list[Any]:
    """Contents of a trace file, without times and numbers: roots in their order, with their children."""
    headers: dict[int, dict[str, Any]] = {}
    stamps: dict[int, list[tuple[str, int]]] = defaultdict(list)
    tensors: dict[int, list[tuple[str, ...]]] = defaultdict(list)
    children: dict[int, list[int]] = defaultdict(list)
    for record in records(file):
        number = record["id"]
        if "model_name" in record:
            headers[number] = record
            children[record.get("parent_id", 0)].append(number)
        for stamp in record.get("timestamps", ()):
            stamps[number].append((stamp["name"], stamp["ns"]))
        if "tensor" in record:
            tensor = record["tensor"]
            found = tuple(tensor[key] for key in ("name", "data", "shape", "dtype"))
            tensors[number].append((record["activity"], *found))

    def tree(number: int) -> Any:
        header = headers[number]
        return {
            "model": (header["model_name"], header["model_version"], header.get("request_id")),
            "stamps": chained(stamps[number]),
            "tensors": sorted(tensors[number]),
            "children": [tree(child) for child in sorted(children[number])],
        }

    return [tree(number) for number in sorted(children[0])]


def test_files_hold_the_same_records(tmp_path: Path) -> None:
    levels = ("level=TIMESTAMPS", "level=TENSORS", "rate=1")
    asked(tmp_path, lambda name: (*levels, f"triton,file={tmp_path / name}.json"))
    theirs, ours = (trees(tmp_path / f"{name}.json") for name in ("triton", "conch"))
    assert ours == theirs


def span_trees(spans: Sequence[Span]) -> list[Any]:
    """Spans without times and random ids: roots in the order of their starts, with their children."""
    known = {span.span_id for span in spans}
    ordered = sorted(spans, key=lambda span: span.start_time_unix_nano)

    def tree(span: Span) -> Any:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        return {
            "name": span.name,
            "kind": span.kind,
            "attributes": {
                attribute.key: MessageToDict(attribute.value)
                for attribute in span.attributes
                if attribute.key in TRITONS
            },
            "events": chained([(event.name, event.time_unix_nano) for event in span.events]),
            "parent": span.parent_span_id if span.parent_span_id not in known else b"",
            "trace": span.trace_id if int.from_bytes(span.trace_id, "big") == 7 else b"",
            "children": [tree(child) for child in ordered if child.parent_span_id == span.span_id],
        }

    return [tree(span) for span in ordered if span.parent_span_id not in known]


def unlinked(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree without the context that its caller gave."""
    children = [unlinked(child) for child in tree["children"]]
    return {**tree, "parent": b"", "trace": b"", "children": children}


def test_collectors_get_the_same_spans(tmp_path: Path) -> None:
    with http_collector() as theirs, http_collector() as ours:

        def configs(name: str) -> Sequence[str]:
            url = (theirs if name == "triton" else ours).url
            exporter = (f"opentelemetry,url={url}", "opentelemetry,bsp_schedule_delay=100")
            return ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", *exporter)

        asked(tmp_path, configs)
        their_trees, our_trees = span_trees(theirs.spans), span_trees(ours.spans)
    assert len(their_trees) == len(REQUESTS)
    assert sum(tree["parent"] == CALLERS_SPAN for tree in our_trees) == 2
    for one, other in zip(our_trees, their_trees, strict=True):
        # On a busy machine Triton at times overlooks the context of a gRPC call.
        overlooked = one["parent"] == CALLERS_SPAN and other["parent"] == b""
        assert (unlinked(one) if overlooked else one) == other
