"""Runs a reranking model of OpenVINO GenAI as a Python model with `score`, mostly in a worker.

The server imports this module for the declaration, without the engine. Threads: one pipeline, which takes
one call at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.core.errors import InvalidArgumentError
from conch_engines.genai.model_on_disk import SCORE, find_model, parameters_of
from conch_engines.genai.vector_settings import VectorSettings
from conch_llm.models.model_requests import EmbeddingRequest

if TYPE_CHECKING:
    from conch_engines.genai.text_lengths import TextLengths


class TritonPythonModel:
    """One instance: a pipeline."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model."""
        from conch_engines.genai.genai_library import genai, opened
        from conch_engines.genai.text_lengths import TextLengths

        parameters = parameters_of(args)
        directory = Path(args["model_repository"], args["model_version"])
        settings = VectorSettings.of(parameters, SCORE, directory)
        files = find_model(directory, args["model_name"], SCORE)
        longest = settings.max_model_len or files.context_length
        self._lock = threading.Lock()
        with opened(files.path):
            self._lengths: TextLengths = TextLengths(files.path, longest, pairs=True)
            self._pipeline: Any = genai.TextRerankPipeline(
                str(files.path), settings.device, **settings.properties()
            )

    def score(
        self, query: str, documents: Sequence[str], request: EmbeddingRequest
    ) -> tuple[list[float], list[int]]:
        """Scores documents by their relevance to a query; returns scores and token counts, by document."""
        if not query or not all(documents):
            raise InvalidArgumentError("query, documents: the engine openvino_genai takes no empty texts")
        with self._lock:
            counts = [self._lengths.count(query, document) for document in documents]
            # One by one: the tokenizer repeats the query for each document, and writes beyond its buffer if
            # all documents are short (openvino-tokenizers 2026.4.1).
            scores = [self._pipeline.rerank(query, [document])[0][1] for document in documents]
        return scores, counts
