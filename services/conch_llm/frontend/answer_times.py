"""Times of one streamed answer, for the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from conch_llm.frontend.openai_answers import Usage
from conch_llm.frontend.openai_call import OpenAiCall


class AnswerTimes:
    """Measures the first token and the gaps of an answer, from when this is made."""

    def __init__(self, call: OpenAiCall) -> None:
        self._call = call
        self._last_s = time.monotonic()
        self._first = True
        self._generated = 0

    def add(self, parts: Sequence[object]) -> None:
        """Notes that parts of the answer have come."""
        if not parts:
            return
        now = time.monotonic()
        measure = self._call.metrics.first_token if self._first else self._call.metrics.gap
        measure(self._call.model, now - self._last_s)
        self._first = False
        self._last_s = now

    def count(self, usage: Usage) -> None:
        """Counts the tokens that have come since."""
        grown = usage.completion_tokens - self._generated
        if grown:
            self._generated += grown
            self._call.metrics.generated(self._call.model, grown)
