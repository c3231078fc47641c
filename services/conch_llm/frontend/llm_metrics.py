"""Metrics of OpenAI's routes.

Threads and locks: the event loops of ports count, each under the lock; the metrics port reads. The dicts only
grow, and one copy of their items is atomic.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from conch.observability.metrics.metric_families import Family, number, sample

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAPS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUESTS = Family("conch_llm_requests_total", "counter", "Requests to OpenAI's routes, by status")
_FIRST = Family(
    "conch_llm_time_to_first_token_seconds",
    "histogram",
    "Time from a request's headers to the first token of its answer",
)
_GAP = Family(
    "conch_llm_inter_token_seconds", "histogram", "Time between tokens of a streamed answer that come apart"
)
_PROMPT = Family("conch_llm_prompt_tokens_total", "counter", "Tokens of prompts, as models count them")
_GENERATED = Family("conch_llm_generation_tokens_total", "counter", "Tokens of answers, as models count them")
_CACHED = Family(
    "conch_llm_cached_tokens_total", "counter", "Tokens of prompts that were found in a prefix cache"
)
_CANCELLED = Family("conch_llm_cancelled_total", "counter", "Answers that ended early, by reason")

DISCONNECT = "disconnect"
"""Reasons for an answer's early end."""


class _Histogram:
    def __init__(self, family: Family, bounds: Sequence[float]) -> None:
        self._family = family
        self._bounds = bounds
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def add(self, model: str, seconds: float) -> None:
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = [0] * (len(self._bounds) + 1)
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[model] = self._sums.get(model, 0.0) + seconds

    def totals(self, model: str) -> tuple[int, float]:
        return sum(self._counts.get(model, ())), self._sums.get(model, 0.0)

    def samples(self) -> tuple[Family, list[str]]:
        name = self._family.name
        lines = []
        for model, counts in sorted(self._counts.items()):
            below = list(accumulate(list(counts)))
            for bound, count in zip((*map(number, self._bounds), "+Inf"), below, strict=True):
                lines.append(sample(f"{name}_bucket", count, {"model": model, "le": bound}))
            lines.append(sample(f"{name}_sum", self._sums.get(model, 0.0), {"model": model}))
            lines.append(sample(f"{name}_count", below[-1], {"model": model}))
        return self._family, lines


class LlmMetrics:
    """Counts what OpenAI's routes do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str, int], int] = {}
        self._cancelled: dict[tuple[str, str], int] = {}
        self._prompt: dict[str, int] = {}
        self._generated: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._context: dict[str, int] = {}
        self._first = _Histogram(_FIRST, _FIRST_TOKEN_S)
        self._gaps = _Histogram(_GAP, _GAPS_S)

    def answered(self, route: str, model: str, status: int) -> None:
        """Counts a request; `model` is empty for a name that no model has."""
        key = (route, model, status)
        with self._lock:
            self._requests[key] = self._requests.get(key, 0) + 1

    def first_token(self, model: str, seconds: float) -> None:
        """Counts an answer's first token."""
        with self._lock:
            self._first.add(model, seconds)

    def gap(self, model: str, seconds: float) -> None:
        """Counts the time between two tokens."""
        with self._lock:
            self._gaps.add(model, seconds)

    def generated(self, model: str, tokens: int) -> None:
        """Counts tokens of an answer as they come."""
        with self._lock:
            self._generated[model] = self._generated.get(model, 0) + tokens

    def ended(self, model: str, prompt: int, generated: int, cached: int) -> None:
        """Counts the prompt of an answer that has ended, and notes what it has used of the context."""
        with self._lock:
            self._prompt[model] = self._prompt.get(model, 0) + prompt
            self._generated.setdefault(model, 0)
            self._cached[model] = self._cached.get(model, 0) + cached
            if prompt and generated:
                self._context[model] = prompt + generated

    def cancelled(self, model: str, reason: str) -> None:
        """Counts an answer that ended early."""
        with self._lock:
            self._cancelled[model, reason] = self._cancelled.get((model, reason), 0) + 1

    def of_model(self, model: str) -> dict[str, float]:
        """Totals of a model: tokens, first tokens with their seconds, and the last answer's context."""
        first, seconds = self._first.totals(model)
        return {
            "prompt": self._prompt.get(model, 0),
            "generated": self._generated.get(model, 0),
            "cached": self._cached.get(model, 0),
            "first": first,
            "first_s": round(seconds, 6),
            "context": self._context.get(model, 0),
        }

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """All families and their samples."""
        requests = [
            sample(_REQUESTS.name, count, {"route": route, "model": model, "status": str(status)})
            for (route, model, status), count in sorted(self._requests.items())
        ]
        cancelled = [
            sample(_CANCELLED.name, count, {"model": model, "reason": reason})
            for (model, reason), count in sorted(self._cancelled.items())
        ]
        return [
            (_REQUESTS, requests),
            self._first.samples(),
            self._gaps.samples(),
            (_PROMPT, _by_model(_PROMPT, self._prompt)),
            (_GENERATED, _by_model(_GENERATED, self._generated)),
            (_CACHED, _by_model(_CACHED, self._cached)),
            (_CANCELLED, cancelled),
        ]


def _by_model(family: Family, counts: dict[str, int]) -> list[str]:
    return [sample(family.name, count, {"model": model}) for model, count in sorted(counts.items())]
