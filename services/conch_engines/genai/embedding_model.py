"""Runs an embedding model of OpenVINO GenAI as a Python model with `embed`, mostly in a worker.

The server imports this module for the declaration, without the engine. Threads: one text pipeline, which
takes one call at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.core.errors import InvalidArgumentError
from conch_engines.genai.model_on_disk import EMBED, find_model, parameters_of
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
        settings = VectorSettings.of(parameters, EMBED, directory)
        files = find_model(directory, args["model_name"], EMBED)
        config = genai.TextEmbeddingPipeline.Config()
        config.pooling_type = getattr(genai.TextEmbeddingPipeline.PoolingType, settings.pooling.upper())
        config.normalize = settings.normalize
        # Padding on the left would change positions, and what the last token is.
        config.padding_side = "right"
        longest = settings.max_model_len or files.context_length
        self._lock = threading.Lock()
        with opened(files.path):
            self._lengths: TextLengths = TextLengths(files.path, longest)
            self._pipeline: Any = genai.TextEmbeddingPipeline(
                str(files.path), settings.device, config, **settings.properties()
            )

    def embed(
        self, inputs: Sequence[str | Sequence[int]], request: EmbeddingRequest
    ) -> tuple[list[list[float]], list[int]]:
        """The vectors of texts."""
        if request.params.get("dimensions") is not None:
            raise InvalidArgumentError("dimensions: the model's vectors have a size of their own")
        texts = [each for each in inputs if isinstance(each, str)]
        if len(texts) != len(inputs):
            raise InvalidArgumentError("input: the engine openvino_genai takes texts, not tokens")
        with self._lock:
            counts = [self._lengths.count(text) for text in texts]
            rows: list[list[float]] = self._pipeline.embed_documents(texts)
        return rows, counts
