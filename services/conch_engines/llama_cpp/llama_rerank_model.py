"""Runs a reranking model of llama.cpp as a Python model with `score`, in a worker.

The server imports this module for the declaration, without the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from conch_llm.models.model_requests import EmbeddingRequest

if TYPE_CHECKING:
    from conch_engines.llama_cpp.llama_vector_engine import VectorEngine


class TritonPythonModel:
    """One instance: an engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model."""
        from conch_engines.llama_cpp.llama_vector_engine import VectorEngine

        self._engine: VectorEngine = VectorEngine(args, scores=True)

    def score(
        self, query: str, documents: Sequence[str], request: EmbeddingRequest
    ) -> tuple[list[float], int]:
        """Scores documents by their relevance to a query; returns scores, and the number of tokens."""
        return self._engine.score(query, documents)

    def finalize(self) -> None:
        """Ends the engine."""
        self._engine.close()
