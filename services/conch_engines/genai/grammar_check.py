"""Checks grammars before the engine gets them.

A step of the engine that meets a malformed grammar raises, and the engine can't go on: all running requests
would fail. So a random model of 240 KB takes each grammar first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conch.core.engine_text import engine_text
from conch.core.errors import InvalidArgumentError
from conch.core.temporary_folder import TemporaryFolder
from conch_engines.genai.genai_library import genai, openvino
from conch_engines.language.grammar_limits import check_limits
from conch_engines.language.grammars import Grammar
from conch_engines.language.random_model import write_random_model

_REMEMBERED = 1 << 20  # characters of grammars
_SHOWN = 300


class GrammarCheck:
    """Checks grammars; remembers the last that were fine.

    The pipeline keeps all that it has compiled, so it is opened again when it has had as many characters as
    are remembered.
    """

    def __init__(self) -> None:
        self._pipeline: Any = None
        self._compiled = 0
        self._fine: dict[Grammar, None] = {}
        self._size = 0

    def check(self, grammar: Grammar) -> None:
        """Checks a grammar. Raises InvalidArgumentError: it is malformed, or over a limit."""
        if grammar in self._fine:
            self._fine[grammar] = self._fine.pop(grammar)
            return
        check_limits(grammar)
        if self._compiled > _REMEMBERED:
            self._pipeline, self._compiled = None, 0
        self._compiled += len(grammar.text)
        self._run(grammar)
        self._fine[grammar] = None
        self._size += len(grammar.text)
        while self._size > _REMEMBERED:
            oldest = next(iter(self._fine))
            del self._fine[oldest]
            self._size -= len(oldest.text)

    def _run(self, grammar: Grammar) -> None:
        if self._pipeline is None:
            self._pipeline = _open()
        try:
            config = self._pipeline.get_config()
            config.max_new_tokens = 1
            config.structured_output_config = structure(grammar)
            prompt = openvino.Tensor(np.array([[1]], np.int64))
            # The engine drops a request without a handle.
            handle = self._pipeline.add_request(0, prompt, config)
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            del handle
        except RuntimeError as error:
            self._pipeline = None  # it can't go on
            raise InvalidArgumentError(f"{grammar.kind}: is invalid: {engine_text(error)[:_SHOWN]}") from None


def structure(grammar: Grammar) -> Any:
    """A grammar as the engine takes it."""
    return genai.StructuredOutputConfig(**{grammar.kind: grammar.text})


def _open() -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 4
    with TemporaryFolder("conch-genai-") as directory:
        path = directory / "model.gguf"
        write_random_model(path)
        return genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", {})
