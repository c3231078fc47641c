"""A stand-in for vLLM with the parts that conch calls: an engine that streams the words of its prompt.

Some prompts have effects: ``endless`` never stops, ``parameters`` returns the sampling parameters that came
and ``requests`` how many were begun and aborted, ``refuse`` fails with an error of the client, ``break`` with
another one, and ``die`` ends the engine. All modules of the package are this one file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__version__ = "0.32.7"
__path__: list[str] = []

PACE_S = 0.002
REGISTRY = CollectorRegistry()
_LABELS = ("model_name", "engine")
RUNNING = Gauge("vllm:num_requests_running", "Running requests.", _LABELS, registry=REGISTRY)
PROMPT = Counter("vllm:prompt_tokens", "Tokens of prompts.", _LABELS, registry=REGISTRY)
GAPS = Histogram("vllm:inter_token_latency_seconds", "Gaps.", _LABELS, registry=REGISTRY, buckets=(0.001, 1))
_OTHER = Counter("python_things", "Not of vLLM.", registry=REGISTRY)


class VLLMClientError(Exception):
    pass


class EngineDeadError(Exception):
    pass


class UsageContext(Enum):
    OPENAI_API_SERVER = 1


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")


@dataclass
class PoolingParams:
    dimensions: int | None = None
    task: str | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class AsyncEngineArgs:
    model: str = "unnamed"
    served_model_name: list[str] | None = None
    tensor_parallel_size: int = 1
    enable_lora: bool = False
    disable_log_stats: bool = False
    enable_log_requests: bool = False
    tasks: list[str] = field(default_factory=lambda: ["generate"])

    def create_engine_config(self, usage_context: UsageContext | None = None) -> AsyncEngineArgs:
        if self.model == "missing":
            raise ValueError("no such model")
        return self


class AsyncLLM:
    def __init__(self, config: AsyncEngineArgs) -> None:
        assert config.served_model_name is not None
        self.config = config
        self.errored = False
        self.begun = self.aborted = 0
        self.labels = (config.served_model_name[0], "0")
        self.model_config = SimpleNamespace(get_diff_sampling_param=lambda: {"top_k": 7})

    @classmethod
    def from_vllm_config(cls, vllm_config: AsyncEngineArgs, usage_context: Any, **more: bool) -> AsyncLLM:
        return cls(vllm_config)

    async def get_supported_tasks(self) -> list[str]:
        return self.config.tasks

    def shutdown(self) -> None:
        pass

    async def encode(self, prompt: Any, params: PoolingParams, request_id: str) -> Any:
        size = params.dimensions or 4
        tokens = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt.split()
        yield SimpleNamespace(
            outputs=SimpleNamespace(data=np.full(size, len(tokens))), prompt_token_ids=tokens
        )

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, lora_request: Any = None
    ) -> Any:
        text = prompt["prompt"] if isinstance(prompt, dict) else prompt
        self.begun += text != "requests"
        RUNNING.labels(*self.labels).inc()
        PROMPT.labels(*self.labels).inc(len(text.split()))
        try:
            async for each in self._outputs(text, params, lora_request):
                yield each
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            RUNNING.labels(*self.labels).dec()

    async def _outputs(self, text: str, params: SamplingParams, lora: LoRARequest | None) -> Any:
        words = [f" {word}" for word in text.split()]
        if text == "parameters":
            words = [json.dumps({**vars(params), "adapter": lora and vars(lora)}, default=str)]
        elif text == "requests":
            words = [json.dumps([self.begun, self.aborted])]
        elif text == "refuse":
            raise VLLMClientError("the prompt is refused")
        elif text == "break":
            raise RuntimeError
        elif text == "die":
            self.errored = True
            raise EngineDeadError("EngineCore encountered an issue.")
        said = ""
        count = 0
        while count < len(words) or text == "endless":
            await asyncio.sleep(PACE_S)
            GAPS.labels(*self.labels).observe(PACE_S)
            word = words[count % len(words)]
            said += word
            count += 1
            last = count == len(words) and text != "endless"
            if params.output_kind is RequestOutputKind.DELTA:
                yield _output(text, [_choice(i, word, 1, last) for i in range(params.n)], last)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield _output(text, [_choice(i, said, count, True) for i in range(params.n)], True)


def _choice(index: int, text: str, count: int, last: bool) -> SimpleNamespace:
    one = SimpleNamespace(logprob=-0.5, rank=1, decoded_token=text)
    return SimpleNamespace(
        index=index,
        text=text,
        token_ids=list(range(count)),
        cumulative_logprob=-0.5 * count,
        logprobs=[{3: one}] * count,
        finish_reason="stop" if last else None,
    )


def _output(prompt: str, outputs: list[SimpleNamespace], finished: bool) -> SimpleNamespace:
    return SimpleNamespace(outputs=outputs, finished=finished, prompt_token_ids=prompt.split())


def get_prometheus_registry() -> CollectorRegistry:
    return REGISTRY


class App:
    """The application: responds with the body that it gets, in pieces if that has ``stream``."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.state = SimpleNamespace()
        self.routes = [
            SimpleNamespace(path=path) for path in ("/v1/completions", "/v1/chat/completions", "/scale")
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        engine = self.state.engine
        kind = b"text/event-stream" if body.get("stream") else b"application/json"
        status = 400 if body.get("bad") else 200
        if body.get("die"):
            engine.errored = True
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        engine.begun += 1
        if body.get("endless"):
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            assert (await receive())["type"] == "http.disconnect"
            engine.aborted += 1
            return
        if body.get("stream"):
            for word in body["prompt"].split():
                await send({"type": "http.response.body", "body": word.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        said = {"path": scope["path"], "tool_call_parser": self.arguments.tool_call_parser}
        said |= {"names": self.arguments.served_model_name, "lora_modules": self.arguments.lora_modules}
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def build_app(args: Any, supported_tasks: Any) -> App:
    return App(args)


async def init_app_state(client: AsyncLLM, state: Any, args: Any) -> None:
    state.engine = client


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--tool-call-parser", choices=["hermes"])
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.add_argument("--lora-modules", nargs="+")
    return parser


def _module(name: str, **names: Any) -> None:
    """Makes a module of the package, and the packages above it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        each = ".".join(parts[:end])
        if each not in sys.modules:
            made = ModuleType(each)
            made.__path__ = []
            sys.modules[each] = made
    vars(sys.modules[name]).update(names)


_module("vllm.engine.arg_utils", AsyncEngineArgs=AsyncEngineArgs)
_module("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)
_module("vllm.v1.metrics.prometheus", get_prometheus_registry=get_prometheus_registry)
_module("vllm.usage.usage_lib", UsageContext=UsageContext)
_module("vllm.lora.request", LoRARequest=LoRARequest)
_module("vllm.pooling_params", PoolingParams=PoolingParams)
_module(
    "vllm.sampling_params",
    RequestOutputKind=RequestOutputKind,
    SamplingParams=SamplingParams,
    StructuredOutputsParams=StructuredOutputsParams,
)
_module("vllm.entrypoints.launchers.api_server.entry", build_app=build_app, init_app_state=init_app_state)
_module("vllm.entrypoints.launchers.cli_args", make_arg_parser=make_arg_parser)
_module("vllm.utils.argparse_utils", FlexibleArgumentParser=argparse.ArgumentParser)
