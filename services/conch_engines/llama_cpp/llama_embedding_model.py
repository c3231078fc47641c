"""Runs an embedding model of llama.cpp as a Python model with `embed`, in a worker.

The server imports this module for the declaration, without the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from conch.core.errors import InvalidArgumentError
from conch_llm.models.model_requests import EmbeddingRequest

if TYPE_CHECKING:
    from conch_engines.llama_cpp.llama_vector_engine import VectorEngine


class TritonPythonModel:
    """One instance: an engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model."""
        from conch_engines.llama_cpp.llama_vector_engine import VectorEngine

        self._engine: VectorEngine = VectorEngine(args, scores=False)

    def embed(
        self, inputs: Sequence[str | Sequence[int]], request: EmbeddingRequest
    ) -> tuple[list[list[float]], list[int]]:
        """The vectors of texts."""
        if request.params.get("dimensions") is not None:
            raise InvalidArgumentError("dimensions: the model's vectors have a size of their own")
        return self._engine.embed(inputs)

    def finalize(self) -> None:
        """Ends the engine."""
        self._engine.close()
