"""Embeddings and scores of the backend openvino_genai, with random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.genai_models import LONGEST, genai_library, random_model, random_vectors
from tests.support.text_models import asked

import conch.testing
from conch.core.errors import InvalidArgumentError

genai_library()
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


POOLING = "1_Pooling/config.json"
MODULES = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
POOLED = [*MODULES, {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
NORMALIZED = [*POOLED, {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]


def described(root: Path, files: dict[str, Any], **parameters: str) -> Path:
    """A model with files of Sentence Transformers in its folder."""
    directory = random_vectors(root, EMBEDDER, **IN_PROCESS, **parameters)
    for name, content in files.items():
        path = directory / "1" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "parameters", "same"),
    [
        ({POOLING: {"pooling_mode_mean_tokens": True}}, {}, {"pooling": "mean"}),
        (
            {POOLING: {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}},
            {},
            {"pooling": "cls"},
        ),
        ({POOLING: {"pooling_mode": "lasttoken"}, "modules.json": NORMALIZED}, {}, {"pooling": "last_token"}),
        (
            {POOLING: {"pooling_mode_mean_tokens": True}, "modules.json": POOLED},
            {},
            {"pooling": "mean", "normalize": "false"},
        ),
        (
            {"pool/config.json": {"pooling_mode": ["mean"]}, "modules.json": [{**POOLED[1], "path": "pool"}]},
            {"normalize": "true"},
            {"pooling": "mean"},
        ),
        (
            {POOLING: {"pooling_mode_max_tokens": True}, "modules.json": POOLED},
            {"pooling": "cls"},
            {"pooling": "cls", "normalize": "false"},
        ),
    ],
)
def test_a_folder_says_how_vectors_are_made(
    tmp_path: Path, files: dict[str, Any], parameters: dict[str, str], same: dict[str, str]
) -> None:
    def vector(directory: Path) -> Any:
        with conch.testing.load(directory) as model:
            return answer(model, EMBED, input="hello")["data"][0]

    expected = vector(random_vectors(tmp_path / "expected", EMBEDDER, **IN_PROCESS, **same))
    assert vector(described(tmp_path, files, **parameters)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "1_Pooling/config.json' does not say .*: set parameter 'pooling' to cls, mean or last_token"),
        ({POOLING: {"pooling_mode_max_tokens": True}}, "asks for max: set parameter 'pooling'"),
        (
            {POOLING: {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            "asks for cls and mean: set",
        ),
        ({POOLING: []}, "must have a JSON object"),
        ({"modules.json": ["x.Pooling"]}, "modules.json' has None"),
        ({"modules.json": {}}, "modules.json' must have a JSON list"),
        (
            {POOLING: {"pooling_mode": "cls"}, "modules.json": [*POOLED, {"type": "x.Dense"}]},
            "modules.json' has Dense, which the engine does not apply",
        ),
    ],
)
def test_a_pooling_is_not_guessed(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    with (
        pytest.raises(conch.testing.ModelError, match=problem),
        conch.testing.load(described(tmp_path, files)),
    ):
        pass


def test_vectors_may_keep_their_length(tmp_path: Path) -> None:
    directory = random_vectors(tmp_path, EMBEDDER, **IN_PROCESS, pooling="cls", normalize="false")
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
    parameters = {"pooling": "cls"} if architecture == EMBEDDER else {}
    with conch.testing.load(random_vectors(tmp_path, architecture, **IN_PROCESS, **parameters)) as model:
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
    directory = random_vectors(tmp_path, "Qwen3ForCausalLM", **IN_PROCESS, CONCH_TASK="embed", pooling="cls")
    with conch.testing.load(directory) as model:
        assert len(answer(model, EMBED, input="a")["data"]) == 1
    with pytest.raises(conch.testing.ModelError, match="needs a folder of OpenVINO, not GGUF"):
        conch.testing.load(random_model(tmp_path, CONCH_TASK="embed", pooling="cls"))


@pytest.mark.process
def test_in_a_worker(tmp_path: Path) -> None:
    with conch.testing.load(random_vectors(tmp_path, EMBEDDER, pooling="cls"), placement="worker") as model:
        assert len(answer(model, EMBED, input=["a", "b"])["data"]) == 2
