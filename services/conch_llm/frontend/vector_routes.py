"""Embeddings, scores and reranking."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from conch_llm.calls.generation import EmbeddingCall
from conch_llm.calls.model_calls import ModelCalls
from conch_llm.contract import EMBEDDINGS, SCORE
from conch_llm.frontend.model_names import NamedModel
from conch_llm.frontend.openai_answers import encoded_around
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import (
    EMBEDDING_FIELDS,
    RERANK_FIELDS,
    SCORE_FIELDS,
    checked,
)
from conch_llm.frontend.text_models import TextModels

_FLOAT_BYTES = 20


class VectorRoutes:
    """Answers requests for vectors and scores.

    Args:
        calls: Calls models.
        texts: Tokenizers of models that take tensors.
    """

    def __init__(self, calls: ModelCalls, texts: TextModels) -> None:
        self._calls = calls
        self._texts = texts

    async def embeddings(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers a request for embeddings."""
        fields = await call.run_long(checked, body, EMBEDDING_FIELDS, ("input",))
        can = model.capability
        if not can.takes_body(EMBEDDINGS):
            if not can.takes_text(EMBEDDINGS):
                raise RequestError(f"The model `{model.name}` does not make embeddings", "model")
            await self._texts.tokenizer(model.servable)
        asked = EmbeddingCall(
            fields=fields,
            body=call.body,
            inputs=fields["input"],
            dimensions=fields.get("dimensions"),
            request_id=call.request_id,
        )
        found = await self._calls.embed(model.servable, asked, call.exchange)
        coded = fields.get("encoding_format") == "base64"
        head = {"object": "list", "model": model.name, "usage": _usage(call, found.prompt_tokens)}
        data = (
            {"object": "embedding", "index": index, "embedding": (_base64 if coded else _listed)(vector)}
            for index, vector in enumerate(found.vectors)
        )
        size = sum(map(len, found.vectors)) * _FLOAT_BYTES
        await call.reply_with(lambda: encoded_around(head, "data", data), size)

    async def score(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers a request for scores of texts by a query."""
        fields = await call.run_long(checked, body, SCORE_FIELDS, ("text_1", "text_2"))
        _check_scores(model)
        found = await self._calls.score(
            model.servable, fields["text_1"], fields["text_2"], call.exchange, call.request_id
        )
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(found.scores)
        ]
        call.reply(
            {
                "id": f"score-{call.request_id}",
                "object": "list",
                "model": model.name,
                "data": data,
                "usage": _usage(call, found.prompt_tokens),
            }
        )

    async def rerank(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers a request for documents in the order of their relevance."""
        fields = await call.run_long(checked, body, RERANK_FIELDS, ("query", "documents"))
        _check_scores(model)
        documents = fields["documents"]
        found = await self._calls.score(
            model.servable, fields["query"], documents, call.exchange, call.request_id
        )
        order = sorted(range(len(documents)), key=lambda index: -found.scores[index])
        shown = fields.get("return_documents", True)
        results = []
        for index in order[: fields.get("top_n") or len(documents)]:
            result: dict[str, Any] = {"index": index, "relevance_score": found.scores[index]}
            if shown:
                result["document"] = {"text": documents[index]}
            results.append(result)
        head = {
            "id": f"rerank-{call.request_id}",
            "model": model.name,
            "usage": _usage(call, found.prompt_tokens),
        }
        size = sum(map(len, documents)) if shown else 0
        await call.reply_with(lambda: encoded_around(head, "results", results), size)


def _check_scores(model: NamedModel) -> None:
    if not model.capability.takes_body(SCORE):
        raise RequestError(f"The model `{model.name}` does not score texts", "model")


def _usage(call: OpenAiCall, prompt_tokens: int | None) -> dict[str, int] | None:
    if prompt_tokens is None:
        return None
    call.metrics.ended(call.model, prompt_tokens, 0, 0)
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}


def _listed(vector: Any) -> list[float]:
    found: list[float] = np.asarray(vector, np.float64).tolist()
    return found


def _base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
