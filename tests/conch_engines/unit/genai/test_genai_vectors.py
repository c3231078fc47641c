"""Embeddings and scores of the backend openvino_genai, with random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.genai_models import LONGEST, random_model, random_vectors
from tests.support.text_models import asked

import conch.testing
from conch.core.errors import InvalidArgumentError

pytest.importorskip("conch_engines.genai.genai_library")
EMBEDDER, RERANKER = "BertModel", "BertForSequenceClassification"
EMBED, RERANK = "/v1/embeddings", "/v1/rerank"
IN_PROCESS = {"CONCH_PLACEMENT": "in_process"}


def answer(model: conch.testing.LoadedModel, route: str, **body: Any) -> Any:
    (response,) = model.run(**asked(route, body))
    return json.loads(response["text_output"][0])


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
def test_each_text_has_the_vector_that_it_has_alone(tmp_path: Path, pooling: str) -> None:
    directory = random_vectors(tmp_path, EMBEDDER, **IN_PROCESS, pooling=pooling)
    texts = ["hello", "a thing here", "x"]
    with conch.testing.load(directory) as model:
        assert model.config["parameters"]["CONCH_LLM"] == {"string_value": "embed"}
        found = answer(model, EMBED, input=texts)
        assert found["prompt_tokens"] == 7 + 12 + 3  # letters, and two around them
        vectors = np.array(found["data"])
        alone = [answer(model, EMBED, input=text)["data"][0] for text in texts]
    np.testing.assert_allclose(vectors, alone, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    likeness = (vectors @ vectors.T - np.eye(3)).max()
    assert (likeness > 0.999) == (pooling == "cls")  # whose token begins all texts


def test_vectors_may_keep_their_length(tmp_path: Path) -> None:
    directory = random_vectors(tmp_path, EMBEDDER, **IN_PROCESS, normalize="false")
    with conch.testing.load(directory) as model:
        (vector,) = answer(model, EMBED, input="hello")["data"]
    assert abs(np.linalg.norm(vector) - 1) > 0.01


def test_the_error_of_a_model_that_can_not_be_opened_names_no_source_of_the_engine(tmp_path: Path) -> None:
    from conch_engines.genai.genai_library import genai, opened

    with pytest.raises(InvalidArgumentError) as caught, opened(tmp_path):
        genai.LLMPipeline(str(tmp_path), "CPU")
    assert caught.value.message.startswith(f"the engine can't open '{tmp_path}': Could not find a model")


def test_scores(tmp_path: Path) -> None:
    """A query that is longer than all documents together does not disturb the tokenizer."""
    query, documents = "hello there", ["a", "thing", "x"]
    with conch.testing.load(random_vectors(tmp_path, RERANKER, **IN_PROCESS)) as model:
        assert model.config["parameters"]["CONCH_LLM"] == {"string_value": "score"}
        found = answer(model, RERANK, query=query, documents=documents)
        alone = [answer(model, RERANK, query=query, documents=[each])["scores"][0] for each in documents]
        assert found == {"scores": alone, "prompt_tokens": 3 * (10 + 3) + 7}
        assert len(set(alone)) == 3 and all(0 < score < 1 for score in alone)


@pytest.mark.parametrize(
    ("architecture", "route", "body", "problem"),
    [
        (EMBEDDER, EMBED, {"input": [1, 2]}, "input: the engine openvino_genai takes texts"),
        (EMBEDDER, EMBED, {"input": "a", "dimensions": 2}, "dimensions: "),
        (EMBEDDER, EMBED, {"input": "a" * LONGEST}, f"maximum context length is {LONGEST} tokens. However"),
        (RERANKER, RERANK, {"query": "", "documents": ["a"]}, "query, documents: "),
        (RERANKER, RERANK, {"query": "a", "documents": ["b" * 62]}, "your input contains 66 tokens"),
    ],
)
def test_requests_that_are_refused(
    tmp_path: Path, architecture: str, route: str, body: dict[str, Any], problem: str
) -> None:
    with conch.testing.load(random_vectors(tmp_path, architecture, **IN_PROCESS)) as model:
        with pytest.raises(conch.testing.ModelError, match=problem) as caught:
            answer(model, route, **body)
        assert caught.value.code == "INVALID_ARG"


@pytest.mark.parametrize(
    ("architecture", "parameters", "problem"),
    [
        (EMBEDDER, {"pooling": "most"}, "parameter 'pooling' must be"),
        (EMBEDDER, {"cache_size_gb": "1"}, "parameter 'cache_size_gb' has no effect"),
        (EMBEDDER, {"CONCH_TOOL_PARSER": "hermes"}, "parameter 'CONCH_TOOL_PARSER' has no effect"),
        (RERANKER, {"pooling": "cls"}, "parameter 'pooling' has no effect"),
        (EMBEDDER, {"CONCH_TASK": "rank"}, "parameter 'CONCH_TASK' must be"),
        ("BertForMaskedLM", {}, "set parameter 'CONCH_TASK' to generate, embed or score"),
    ],
)
def test_configs_that_are_refused(
    tmp_path: Path, architecture: str, parameters: dict[str, str], problem: str
) -> None:
    with pytest.raises(conch.testing.ModelError, match=problem):
        conch.testing.load(random_vectors(tmp_path, architecture, **IN_PROCESS, **parameters))


def test_a_parameter_has_the_last_word_on_the_task(tmp_path: Path) -> None:
    directory = random_vectors(tmp_path, "Qwen3ForCausalLM", **IN_PROCESS, CONCH_TASK="embed")
    with conch.testing.load(directory) as model:
        assert len(answer(model, EMBED, input="a")["data"]) == 1
    with pytest.raises(conch.testing.ModelError, match="needs a folder of OpenVINO, not GGUF"):
        conch.testing.load(random_model(tmp_path, CONCH_TASK="embed"))


@pytest.mark.process
def test_in_a_worker(tmp_path: Path) -> None:
    with conch.testing.load(random_vectors(tmp_path, EMBEDDER), placement="worker") as model:
        assert len(answer(model, EMBED, input=["a", "b"])["data"]) == 2
