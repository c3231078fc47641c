"""Model code runs within the span of its request: for OpenTelemetry's API, and in its log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests.support.otlp_collector import http_collector
from tests.support.servers import WAIT_S, eventually, serving_process, write_model

import conch
from conch.core.tensor import Array

_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
_MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

tracer = TracerProvider().get_tracer("model")


@pb_utils.span("decorated")
def fails():
    raise KeyError("x")


def answer(request):
    with tracer.start_as_current_span("own") as span:
        parent = span.parent
    with pb_utils.span("outer", items=3, share=0.5, sure=True, other=[1]) as outer:
        outer.set_attribute("late", np.int64(2**62))
        with pb_utils.span("inner"):
            with tracer.start_as_current_span("below") as span:
                below = span.parent
        try:
            fails()
        except KeyError:
            pass
    pb_utils.Logger.log_info("it runs")
    found = {"context": request.trace().get_context(), "parent": None, "below": below and below.span_id}
    if parent is not None:
        state = parent.trace_state.to_header()
        found["parent"] = f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01", state
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(found)], dtype=object))])


class TritonPythonModel:
"""
_ATTRIBUTES = {
    "items": AnyValue(int_value=3),
    "share": AnyValue(double_value=0.5),
    "sure": AnyValue(bool_value=True),
    "other": AnyValue(string_value="[1]"),
    "late": AnyValue(int_value=2**62),
}
_KINDS = {
    "plain": "    def execute(self, requests):\n        return [answer(each) for each in requests]\n",
    "coroutine": (
        "    async def execute(self, requests):\n"
        "        import asyncio\n"
        "        await asyncio.sleep(0)\n"
        "        return [answer(each) for each in requests]\n"
    ),
    "generator": "    def execute(self, requests):\n        yield [answer(each) for each in requests]\n",
}


@pytest.mark.process
@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_model_code_runs_within_the_span_of_its_request(tmp_path: Path, placement: str) -> None:
    for kind, code in _KINDS.items():
        write_model(tmp_path, kind, _CONFIG, {"model.py": _MODEL + code})
    body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}
    parent = {"traceparent": f"00-{7:032x}-{8:016x}-01", "tracestate": "a=b"}
    seen = {}
    with http_collector() as collector:
        settings = (
            "mode=opentelemetry",
            "level=TIMESTAMPS",
            "rate=1000",
            f"opentelemetry,url={collector.url}",
        )
        flags = [f"--trace-config={setting}" for setting in settings]
        flags += [f"--backend-config=python,placement={placement}", "--log-verbose=1"]
        with serving_process(tmp_path, flags=flags) as server:
            for kind in _KINDS:
                url = f"http://{server.http_address}/v2/models/{kind}/infer"
                for headers in (parent, {}, parent):
                    answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S).json()
                    found = json.loads(answer["outputs"][0]["data"][0])
                    if not headers:
                        assert found == {"context": None, "parent": None, "below": None}, kind
                        continue
                    context = json.loads(found["context"])
                    assert found["parent"] == [context["traceparent"], context["tracestate"]], kind
                    seen[context["traceparent"]] = found["below"]

            def lines() -> list[str]:
                return [line for line in server.errors.splitlines() if '"it runs"' in line]

            eventually(lambda: len(lines()) == 3 * len(_KINDS), "all lines are there")
            spans = collector.wait_spans((3 + 3) * 2 * len(_KINDS))
            records = [json.loads(line) for line in lines()]
    logged = [f"00-{each['trace_id']}-{each['span_id']}-01" if "trace_id" in each else "" for each in records]
    assert sorted(each for each in logged if each) == sorted(seen)
    assert logged.count("") == len(_KINDS)
    assert len(spans) == (3 + 3) * 2 * len(_KINDS)
    for context, below in seen.items():
        own = [span for span in spans if span.parent_span_id.hex() == context.split("-")[2]]
        (outer,) = (span for span in own if span.name == "outer")
        (compute,) = (span for span in own if span.name == "compute")
        nested = [span for span in spans if span.parent_span_id == outer.span_id]
        inner, decorated = sorted(nested, key=lambda span: span.start_time_unix_nano)
        assert (inner.name, decorated.name) == ("inner", "decorated")
        assert int.from_bytes(inner.span_id, "big") == below
        times = (compute, outer, inner)
        starts = [each.start_time_unix_nano for each in times]
        ends = [each.end_time_unix_nano for each in times]
        assert starts + ends[::-1] == sorted(starts + ends)
        assert inner.end_time_unix_nano <= decorated.start_time_unix_nano
        assert {each.key: each.value for each in outer.attributes} == _ATTRIBUTES
        assert [each.status.code for each in (outer, inner, decorated)] == [0, 0, Status.STATUS_CODE_ERROR]
        assert [(each.key, each.value.string_value) for each in decorated.attributes] == [
            ("error.type", "KeyError")
        ]


def test_bound_functions_run_within_it_too() -> None:
    @conch.span("work")
    async def work() -> None: ...

    @conch.batch
    async def function(X: Array) -> Array:
        await work()
        return X

    with http_collector() as collector:
        settings = [
            "mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={collector.url}"
        ]  # fmt: skip
        ports = {"grpc_port": None, "http_port": None, "metrics_port": None}
        with conch.Server(trace_config=settings, **ports) as server:
            server.bind("m", function, [conch.Tensor("X")], [conch.Tensor("Y")])
            server.infer("m", {"X": np.zeros((1, 1), np.float32)})
        spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"InferRequest", "m", "compute", "work"}
    assert spans["work"].parent_span_id == spans["m"].span_id


def test_a_span_is_refused_where_it_would_be_wrong() -> None:
    with pytest.raises(TypeError, match="span 'items' can't decorate the generator items: use `with`"):

        @conch.span("items")
        def items() -> Iterator[int]:
            yield 1

    with conch.span("once") as once:
        pass
    with pytest.raises(RuntimeError, match="span 'once' was entered before"), once:
        pass
