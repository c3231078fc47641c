"""Embeddings, scores and reranking."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import openai
import pytest


def test_embeddings_are_floats_or_base64(http: httpx.Client, client: openai.OpenAI) -> None:
    asked = {"model": "vectors", "input": ["a", "abc"]}
    assert http.post("/v1/embeddings", json=asked).json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [3.0, 0.5]},
        ],
        "model": "vectors",
        "usage": None,
    }
    coded = http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()["data"][1]
    assert np.frombuffer(base64.b64decode(coded["embedding"]), "<f4").tolist() == [3.0, 0.5]
    # The client asks for base64 by itself.
    found = client.embeddings.create(model="vectors", input="ab")
    assert found.data[0].embedding == [2.0, 0.5]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores(http: httpx.Client, path: str) -> None:
    asked = {"model": "vectors", "text_1": "q", "text_2": ["abcd", "ab"]}
    assert http.post(path, json=asked, headers={"X-Request-Id": "1"}).json() == {
        "id": "score-1",
        "object": "list",
        "model": "vectors",
        "data": [
            {"index": 0, "object": "score", "score": 0.5},
            {"index": 1, "object": "score", "score": 0.25},
        ],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_reranking_sorts_and_cuts(http: httpx.Client, path: str) -> None:
    asked = {"model": "vectors", "query": "q", "documents": ["ab", {"text": "abcd"}, "abc"], "top_n": 2}
    assert http.post(path, json=asked).json()["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "abcd"}},
        {"index": 2, "relevance_score": 0.375, "document": {"text": "abc"}},
    ]
