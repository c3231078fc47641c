"""Model code runs within the span of its request: for OpenTelemetry's API, and in its log."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.support.otlp_collector import http_collector
from tests.support.servers import eventually, serving_process, write_model

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


def answer(request):
    with tracer.start_as_current_span("own") as span:
        parent = span.parent
    pb_utils.Logger.log_info("it runs")
    found = {"context": request.trace().get_context(), "parent": None}
    if parent is not None:
        state = parent.trace_state.to_header()
        found["parent"] = f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01", state
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(found)], dtype=object))])


class TritonPythonModel:
"""
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
def test_the_span_of_the_request_is_current(tmp_path: Path, placement: str) -> None:
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
                    answer = httpx.post(url, json=body, headers=headers, timeout=20).json()
                    found = json.loads(answer["outputs"][0]["data"][0])
                    if not headers:
                        assert found == {"context": None, "parent": None}, kind
                        continue
                    context = json.loads(found["context"])
                    assert found["parent"] == [context["traceparent"], context["tracestate"]], kind
                    seen[context["traceparent"]] = kind

            def lines() -> list[str]:
                return [line for line in server.errors.splitlines() if '"it runs"' in line]

            eventually(lambda: len(lines()) == 3 * len(_KINDS), "all lines are there")
            records = [json.loads(line) for line in lines()]
    logged = [f"00-{each['trace_id']}-{each['span_id']}-01" if "trace_id" in each else "" for each in records]
    assert sorted(each for each in logged if each) == sorted(seen)
    assert logged.count("") == len(_KINDS)
