"""Embeddings and scores of llama.cpp in this process, with random models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import xllamacpp
from tests.support.llama_models import write_reranker

from conch.core.errors import InvalidArgumentError
from conch_engines.language.random_model import write_random_model
from conch_engines.llama_cpp.llama_file import LlamaFile
from conch_engines.llama_cpp.llama_tasks import EMBED, GENERATE, SCORE, check_task, find_task, pooling_of


@contextmanager
def opened(root: Path, write: Callable[[Path], None], **parameters: str) -> Iterator[Any]:
    """The engine of a file with these parameters."""
    from conch_engines.llama_cpp.llama_vector_engine import VectorEngine

    (root / "1").mkdir(parents=True)
    write(root / "1" / "model.gguf")
    given = {"num_threads": "1", "max_num_seqs": "2", **parameters}
    config = {"parameters": {key: {"string_value": value} for key, value in given.items()}}
    args = {
        "model_name": "m",
        "model_repository": str(root),
        "model_version": "1",
        "model_config": json.dumps(config),
    }
    with closing(VectorEngine(args, scores=write is write_reranker)) as engine:
        yield engine


def own_vectors(path: Path, pooling: str, texts: list[str]) -> list[list[float]]:
    """Vectors by the port of the engine itself."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.verbosity = 1
    parameters.embedding = True
    parameters.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling}")
    own = xllamacpp.Server(parameters)
    url = f"{own.listening_address}/v1/embeddings"
    return [
        httpx.post(url, json={"input": text}, timeout=300).json()["data"][0]["embedding"] for text in texts
    ]


@pytest.mark.parametrize(("pooling", "own"), [("mean", "MEAN"), ("last_token", "LAST"), ("cls", "CLS")])
def test_vectors_are_those_of_the_engines_own_port(tmp_path: Path, pooling: str, own: str) -> None:
    texts = ["hello", "a longer text of some words", "b" * 60, "c" * 63, "thing"]
    with opened(tmp_path, write_random_model, pooling=pooling, max_model_len="64") as engine:
        rows, counts = engine.embed([*texts, [5, 6]])
        wanted = own_vectors(tmp_path / "1" / "model.gguf", own, texts)
    np.testing.assert_allclose(rows[:5], wanted, atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert counts[0] == 5 and counts[5] == 2


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (["a", ""], r"input\[1\]: must be non-empty"),
        ([[5, 266]], r"input\[0\]: 266 is no token"),
        (["a" * 65], r"context length is 64 tokens. However, your input\[0\] contains 65 tokens"),
        (["a" * 8000], r"your input\[0\] contains at least \d+ tokens. Please shorten the input"),
    ],
)
def test_an_input_is_refused(tmp_path: Path, inputs: list[Any], named: str) -> None:
    with (
        opened(tmp_path, write_random_model, pooling="mean", max_model_len="64") as engine,
        pytest.raises(InvalidArgumentError, match=named),
    ):
        engine.embed(inputs)


def test_scores_do_not_depend_on_their_company(tmp_path: Path) -> None:
    documents = ["a b", "q r s t", "z"]
    with opened(tmp_path, write_reranker) as engine:
        together, tokens = engine.score("a c", documents)
        alone = [engine.score("a c", [each])[0][0] for each in documents]
        other, _ = engine.score("x", documents)
        with pytest.raises(InvalidArgumentError, match=r"your documents\[1\] contains 7\d tokens"):
            engine.score("a c", ["b", "d " * 65])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert len({round(each, 3) for each in (*together, *other)}) == 6
    assert tokens == sum(2 + len(each.split()) + 2 for each in documents)  # query, document, special ones


@pytest.mark.parametrize(
    ("metadata", "parameters", "task"),
    [
        ({"general.architecture": "llama"}, {}, GENERATE),
        ({"general.architecture": "llama"}, {"CONCH_TASK": "embed"}, EMBED),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 3}, {}, EMBED),
        ({"general.architecture": "nomic-bert"}, {}, EMBED),
        ({"general.architecture": "bert", "bert.pooling_type": 4}, {}, SCORE),
    ],
)
def test_the_task_follows_from_the_file(
    metadata: Mapping[str, Any], parameters: Mapping[str, str], task: str
) -> None:
    assert find_task(LlamaFile(Path("m.gguf"), metadata, {}), parameters) == task


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"CONCH_TASK": "dance"}, "CONCH_TASK"),
        ({"pooling": "mean"}, "'pooling' has no effect"),
        ({"CONCH_TASK": "embed"}, "set parameter 'pooling'"),
        ({"CONCH_TASK": "embed", "pooling": "max"}, "'pooling' must be one of"),
        ({"CONCH_TASK": "score", "pooling": "mean"}, "'pooling' has no effect"),
        ({"CONCH_TASK": "embed", "pooling": "mean", "lora_files": ""}, "'lora_files' has no effect"),
    ],
)
def test_a_parameter_that_does_not_fit_the_task_is_refused(parameters: Mapping[str, str], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        check_task(LlamaFile(Path("m.gguf"), {"general.architecture": "llama"}, {}), parameters)


def test_the_file_may_say_how_it_pools() -> None:
    file = LlamaFile(Path("m.gguf"), {"general.architecture": "bert", "bert.pooling_type": 2}, {})
    assert pooling_of(file, {}) == "cls" and pooling_of(file, {"pooling": "mean"}) == "mean"
