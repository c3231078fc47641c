"""Facts about answers of OpenAI's routes in the access log and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.llm_models import write_native, write_told
from tests.support.otlp_collector import http_collector
from tests.support.servers import WAIT_S, eventually, serving

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
CHOICE = {"index": 0, "finish_reason": "stop"}
STEPS = [
    [{"text": "a", "tokens": 1}],
    [{"tokens": 1, "prompt_tokens": 3, "cached_tokens": 1}, {"finish_reason": "stop"}],
]
MESSAGES = [{"role": "user", "content": json.dumps(STEPS)}]
JSON_BODY = {"type": "application/json", "pieces": [json.dumps({"choices": [CHOICE], "usage": USAGE})]}
EVENTS = [
    json.dumps({"choices": [{"index": 0}]}),
    json.dumps({"choices": [CHOICE]}),
    json.dumps({"usage": USAGE}),
]
STREAMED = {"type": "text/event-stream", "pieces": [f"data: {event}\n\n" for event in (*EVENTS, "[DONE]")]}
LIMITS = {"max_tokens": 7, "temperature": 0.5}
BODIES: list[dict[str, Any]] = [
    {"model": "told", "messages": MESSAGES},
    {"model": "told", "messages": MESSAGES, "stream": True},
    {"model": "native", "messages": MESSAGES, **JSON_BODY},
    {"model": "native", "messages": MESSAGES, "stream": True, **STREAMED},
]


@pytest.mark.process
def test_answers_are_described_by_their_genai_attributes(tmp_path: Path) -> None:
    models, log = tmp_path / "models", tmp_path / "access.log"
    write_told(models)
    write_native(models)
    with http_collector() as collector:
        tracing = ["--trace-config=mode=opentelemetry", f"--trace-config=opentelemetry,url={collector.url}"]
        flags = [f"--access-log={log}", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", *tracing]
        with serving(models, flags=flags) as server:
            url = f"http://{server.http_address}/v1/chat/completions"
            for body in BODIES:
                assert httpx.post(url, json=body | LIMITS, timeout=WAIT_S).status_code == 200
            eventually(lambda: log.read_text().count("\n") == len(BODIES), "all lines are written")
            eventually(
                lambda: sum(span.name == "InferRequest" for span in collector.spans) == len(BODIES),
                "all spans are exported",
            )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    roots = [span for span in collector.spans if span.name == "InferRequest"]
    spans = [{each.key: each.value for each in span.attributes} for span in roots]
    for body, line, span in zip(BODIES, lines, spans, strict=True):
        model = body["model"]
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 1,
        }
        found = {name: value for name, value in line.items() if name.startswith("gen_ai.")}
        assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < WAIT_S
        assert found == expected
        assert span["gen_ai.usage.output_tokens"].int_value == 2
        reasons = span["gen_ai.response.finish_reasons"].array_value.values
        assert [each.string_value for each in reasons] == ["stop"]
        assert span["gen_ai.response.time_to_first_chunk"].double_value > 0
        assert MESSAGES[0]["content"] not in str(line)
