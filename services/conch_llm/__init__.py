"""Language models: OpenAI's routes over every model that can speak text.

Python models import `Delta` and what their methods get from here. A theory of operation is in
``docs/internals/llm.md``.
"""

from conch_llm.deltas import Delta
from conch_llm.models.model_requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

__all__ = ["ChatRequest", "CompletionRequest", "Delta", "EmbeddingRequest", "TokenizeRequest"]
