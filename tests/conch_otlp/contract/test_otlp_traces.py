"""Spans of real requests: whose they continue, what models see of them, and that none is lost or doubled."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.support.otlp_collector import Collector, http_collector
from tests.support.servers import WAIT_S, LocalServer, client_of, eventually, serving, write_model
from tests.support.traced_models import write_models
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

PARENT_ID, TRACE_ID = 8, 7
_CONTEXT = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = request.trace().get_context() or ""
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], dtype=object))])
"""
_CONTEXT_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
_ODD = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
        if number == 1:
            raise ValueError("odd")
        if number == 2:
            time.sleep(0.02)
        if number == 3:
            os._exit(1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))])
"""
_ODD_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


@contextmanager
def exporting(
    repository: Path, *more: str, flags: Sequence[str] = ()
) -> Iterator[tuple[LocalServer, Collector]]:
    """A server whose requests are all traced, and a collector."""
    with http_collector() as collector:
        settings = ["mode=opentelemetry", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}"]
        settings += ["opentelemetry,bsp_schedule_delay=50", *(more or ("rate=1",))]
        given = [*(f"--trace-config={setting}" for setting in settings), *flags]
        with serving(repository, flags=given) as server:
            yield server, collector


def post(server: LocalServer, model: str, number: int = 5, **headers: str) -> httpx.Response:
    body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [number]}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"http://{server.http_address}/v2/models/{model}/infer", json=body, headers=named)


def call(server: LocalServer, model: str, number: int = 5, request_id: str = "", **metadata: str) -> Any:
    given = triton.InferInput("IN", [1], "INT32")
    given.set_data_from_numpy(np.array([number], np.int32))
    with client_of(server) as client:
        return client.infer(model, [given], headers=metadata, request_id=request_id)


def roots(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name == "InferRequest"]


def parent(flags: str) -> str:
    return f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-{flags}"


@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_models_get_the_context_of_their_span(tmp_path: Path, placement: str) -> None:
    write_model(tmp_path, "context", _CONTEXT_CONFIG, {"model.py": _CONTEXT})
    flags = [f"--backend-config=python,placement={placement}"]
    with exporting(tmp_path, flags=flags) as (server, collector):
        answers = [
            json.loads(
                post(server, "context", TraceParent=parent("01"), TRACESTATE="a=b").json()["outputs"][0][
                    "data"
                ][0]
            ),
            json.loads(
                call(server, "context", traceparent=parent("01"), tracestate="a=b").as_numpy("OUT")[0]
            ),
        ]
        spans = collector.wait_spans(6)
    models = sorted(span.span_id.hex() for span in spans if span.name == "context")
    assert sorted(answer["traceparent"] for answer in answers) == [
        f"00-{TRACE_ID:032x}-{span_id}-01" for span_id in models
    ]
    assert {answer["tracestate"] for answer in answers} == {"a=b"}
    assert {span.parent_span_id for span in roots(spans)} == {PARENT_ID.to_bytes(8, "big")}
    assert {span.trace_state for span in spans} == {"a=b"}


def test_a_batch_has_a_span_that_is_linked_with_its_requests(tmp_path: Path) -> None:
    batching = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 600000000 }"
    write_model(tmp_path, "context", _CONTEXT_CONFIG + batching, {"model.py": _CONTEXT})
    given = triton.InferInput("IN", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[1]], np.int32))
    settings = ("rate=1000", "opentelemetry,batch-spans=true")
    with exporting(tmp_path, *settings) as (server, collector), client_of(server) as client:
        answered: SimpleQueue[Any] = SimpleQueue()
        for flags in ("01", "00", "01", "01"):  # a full batch
            headers = {"traceparent": parent(flags)}
            client.async_infer("context", [given], lambda result, error: answered.put(error), headers=headers)
        for _ in range(4):
            assert answered.get(timeout=WAIT_S) is None
        spans = collector.wait_spans(3 * 3 + 1)
    (batch,) = (span for span in spans if span.name == "batch context")
    models = [span for span in spans if span.name == "context"]
    assert sorted((link.trace_id, link.span_id) for link in batch.links) == sorted(
        (span.trace_id, span.span_id) for span in models
    )
    assert len(models) == 3
    assert batch.trace_id != models[0].trace_id and not batch.parent_span_id
    attributes = {each.key: each.value for each in batch.attributes}
    assert attributes["conch.batch.requests"].int_value == attributes["conch.batch.size"].int_value == 4
    for span in spans:
        if span.name == "compute":
            assert [(link.trace_id, link.span_id) for link in span.links] == [(batch.trace_id, batch.span_id)]
            assert span.start_time_unix_nano == batch.start_time_unix_nano
            assert span.end_time_unix_nano == batch.end_time_unix_nano
        elif span is not batch:
            assert not span.links


@pytest.mark.parametrize("policy", ["sampled", "always"])
def test_callers_decide_what_is_sampled(tmp_path: Path, policy: str) -> None:
    write_models(tmp_path)
    with exporting(tmp_path, "rate=1000", f"opentelemetry,parent={policy}") as (server, collector):
        for flags in ("00", "01", "ff", "zz", ""):
            post(server, "leaf", traceparent=parent(flags))
            call(server, "leaf", traceparent=parent(flags))
        post(server, "leaf")
        wanted = 2 * (3 if policy == "always" else 2)
        spans = collector.wait_spans(3 * wanted)
        post(server, "leaf", traceparent=parent("01"))  # the last one: nothing else comes before it
        spans = collector.wait_spans(3 * wanted + 3)
    assert len(roots(spans)) == wanted + 1
    assert {span.trace_id for span in spans} == {TRACE_ID.to_bytes(16, "big")}


def test_a_rate_samples_callers_that_do_not_and_keeps_their_ids(tmp_path: Path) -> None:
    write_models(tmp_path)
    with exporting(tmp_path, "rate=3") as (server, collector):
        for _ in range(3):
            post(server, "leaf", traceparent=parent("00"))
        (root,) = roots(collector.wait_spans(3))
    assert root.trace_id == TRACE_ID.to_bytes(16, "big")


def test_failed_requests_are_marked(tmp_path: Path) -> None:
    write_models(tmp_path)
    with exporting(tmp_path) as (server, collector):
        assert post(server, "leaf", -1).status_code == 500
        assert post(server, "gone").status_code == 404
        with suppress(InferenceServerException):
            call(server, "gone")
        spans = collector.wait_spans(3)
        eventually(lambda: len(roots(collector.spans)) == 3, "all of them")
        spans = collector.spans
    found = Counter(
        (
            {each.key: each.value.string_value for each in root.attributes}["conch.error.stage"],
            root.status.code == Status.STATUS_CODE_ERROR,
        )
        for root in roots(spans)
    )
    assert found == {("compute", True): 1, ("admission", True): 2}


def test_settings_of_the_mode(tmp_path: Path) -> None:
    write_models(tmp_path)
    with exporting(tmp_path) as (server, collector), client_of(server) as client:
        by_grpc = client.get_trace_settings("leaf", as_json=True)["settings"]
        url = f"http://{server.http_address}/v2/models/leaf/trace/setting"
        by_http = httpx.get(url).json()
        assert list(by_http) == [
            *("trace_level", "trace_rate", "trace_count", "trace_mode", "url"),
            *("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"),
        ]
        assert {name: [by_http[name]] for name in ("trace_mode", "url")} == {
            name: by_grpc[name]["value"] for name in ("trace_mode", "url")
        }
        assert httpx.post(url, json={"trace_level": ["OFF"]}).json()["trace_level"] == ["OFF"]
        post(server, "leaf")
        post(server, "cached")
        collector.wait_spans(3)
        assert not [span for span in collector.spans if span.name == "leaf"]


def test_a_ratio_samples_by_the_trace_id(tmp_path: Path) -> None:
    write_models(tmp_path)
    sampled, other = (f"{1:018x}{low}" for low in ("80" + 12 * "0", "7f" + 12 * "f"))
    with exporting(tmp_path, "opentelemetry,ratio=0.5") as (server, collector), client_of(server) as client:
        shown = client.get_trace_settings("leaf", as_json=True)["settings"]
        assert {name: shown[name]["value"] for name in ("trace_rate", "ratio")} == {
            "trace_rate": ["0"],
            "ratio": ["0.5"],
        }
        for trace_id in (other, sampled):
            post(server, "leaf", traceparent=f"00-{trace_id}-{PARENT_ID:016x}-00")
            call(server, "leaf", traceparent=f"00-{trace_id}-{PARENT_ID:016x}-00")
        spans = collector.wait_spans(6)
    assert Counter(root.trace_id.hex() for root in roots(spans)) == {sampled: 2}


def ask_oddly(server: LocalServer, random_: random.Random, number: int) -> str:
    """A request that may fail, be cancelled, or kill its worker; returns its id if the model answered it."""
    given = triton.InferInput("IN", [1], "INT32")
    given.set_data_from_numpy(np.array([random_.choice([0, 0, 1, 2, 2, 3])], np.int32))
    answers: SimpleQueue[Any] = SimpleQueue()
    with client_of(server) as client:
        asked = client.async_infer(
            "odd", [given], lambda result, error: answers.put(error), request_id=str(number)
        )
        if random_.random() < 0.3:
            threading.Event().wait(random_.random() * 0.03)
            asked.cancel()
        error = answers.get(timeout=WAIT_S)
    return str(number) if error is None or "ValueError: odd" in str(error) else ""


@pytest.mark.process
@pytest.mark.parametrize("seed", range(4))
def test_each_request_has_one_root_whatever_happens(tmp_path: Path, seed: int) -> None:
    """Requests fail, are cancelled, lose their worker or their model, and the server stops under them."""
    write_model(tmp_path, "odd", _ODD_CONFIG, {"model.py": _ODD})
    number, clients = 60, 6
    flags = ["--backend-config=python,placement=worker", "--model-control-mode=explicit", "--load-model=*"]
    with http_collector() as collector:
        settings = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={collector.url}")
        given = [*(f"--trace-config={setting}" for setting in settings), *flags]
        with serving(tmp_path, flags=given) as server, ThreadPoolExecutor(clients + 1) as pool:
            asked = [
                pool.submit(ask_oddly, server, random.Random(f"{seed}-{each}"), each)
                for each in range(number)
            ]
            asked[number // 2].result()
            with client_of(server) as client:
                client.unload_model("odd")
                client.load_model("odd")
            for each in asked[: number - clients]:
                each.result()
            server.server.stop()
            answered = {each.result() for each in asked} - {""}
        spans = collector.spans
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "ids are unique"
    tops = roots(spans)
    assert len({span.trace_id for span in tops}) == len(tops), "each trace has one root"
    requests = Counter(
        attribute.value.string_value
        for span in spans
        if span.name == "odd"
        for attribute in span.attributes
        if attribute.key == "triton.request_id"
    )
    assert max(requests.values()) == 1, "no request is traced twice"
    assert answered <= requests.keys()
    assert len(answered) > 5
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span not in tops:
            above = by_id[span.parent_span_id]
            assert above.trace_id == span.trace_id
            assert above.start_time_unix_nano <= span.start_time_unix_nano


def told_by_grpc(server: LocalServer, model: str, number: int, metadata: dict[str, str]) -> str:
    """The ``traceparent`` in the trailing metadata of a ModelInfer call; empty without it."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="IN", datatype="INT32", shape=[1]).contents.int_contents.append(number)
    with grpc.insecure_channel(server.address) as channel:
        call: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(
            request, metadata=tuple(metadata.items()), timeout=WAIT_S
        )
        return str(dict(call.trailing_metadata()).get("traceparent", ""))


def told_by_http(server: LocalServer, model: str, number: int, headers: dict[str, str]) -> list[str]:
    """The header ``traceparent`` of a response of each route; empty without it."""
    infer = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [number]}]}
    bodies = {"infer": infer, "generate": {"IN": [number]}, "generate_stream": {"IN": [number]}}
    url = f"http://{server.http_address}/v2/models/{model}"
    answers = [httpx.post(f"{url}/{route}", json=body, headers=headers) for route, body in bodies.items()]
    return [answer.headers.get("traceparent", "") for answer in answers]


@pytest.mark.parametrize("more", [(), ("--grpc-infer-response-compression-level=low",)])
def test_answers_name_the_root_spans_that_are_exported(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Answers name them for sampled requests, whatever becomes of these."""
    write_models(tmp_path)
    flags = ["--grpc-restricted-protocol=inference:key=secret", "--http-restricted-api=inference:key=secret"]
    settings = ("rate=1000", "opentelemetry,return-header=true")
    cases = [("leaf", 1, "secret"), ("leaf", -1, "secret"), ("gone", 1, "secret"), ("leaf", 1, "wrong")]
    told: list[str] = []
    with exporting(tmp_path, *settings, flags=[*flags, *more]) as (server, collector):
        for sampled in ("01", "00"):
            for model, number, key in cases:
                headers = {"traceparent": parent(sampled), "key": key}
                told.append(told_by_grpc(server, model, number, headers))
                told += told_by_http(server, model, number, headers)
        half = len(told) // 2
        eventually(lambda: len(roots(collector.spans)) >= half, "all that are sampled")
        exported = [f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01" for root in roots(collector.spans)]
    assert sorted(told[:half]) == sorted(exported)
    assert not any(told[half:])


def test_spans_of_a_shadow_are_linked_to_those_of_the_request(tmp_path: Path) -> None:
    config = _ODD_CONFIG + "version_policy { all { } }"
    directory = write_model(tmp_path, "odd", config, {"model.py": _ODD}, (1, 2))
    steps = '[labels]\nstable = 1\n[rollout]\nsteps = ["shadow 100% 1h"]\n'
    (directory / "rollout.toml").write_text(steps)
    with exporting(tmp_path) as (server, collector):

        def copied() -> dict[str, Span]:
            call(server, "odd", request_id="mine")  # again, until the candidate is there
            by_id = {request_id(span): span for span in collector.spans}
            return by_id if "shadow-mine" in by_id else {}

        copy = eventually(copied, "a copy is traced")["shadow-mine"]
    spans = collector.spans
    root = next(span for span in roots(spans) if span.trace_id == copy.trace_id)
    assert copy.parent_span_id == root.span_id
    assert not root.parent_span_id
    (link,) = root.links
    (own,) = [span for span in spans if span.span_id == link.span_id]
    assert (own.trace_id, request_id(own)) == (link.trace_id, "mine")
    assert own.trace_id != copy.trace_id
    routed = {"conch.route.by": "weight", "conch.rollout.id": 1}
    assert (route_of(own), route_of(copy)) == (routed, {})


def route_of(span: Span) -> dict[str, str | int]:
    return {
        each.key: each.value.string_value or each.value.int_value
        for each in span.attributes
        if each.key in ("conch.route.by", "conch.rollout.id")
    }


def request_id(span: Span) -> str:
    found = [each for each in span.attributes if each.key == "triton.request_id"]
    return found[0].value.string_value if found else ""
