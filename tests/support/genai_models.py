"""Random models in a repository, for the backend openvino_genai."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conch_engines.language.random_model import write_random_model
from conch_engines.openvino.openvino_engine import import_openvino

_WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
_VOCABULARY = [*_WORDS, *string.ascii_lowercase, *(f"##{each}" for each in string.ascii_lowercase)]
_WIDTH = 16
LONGEST = 64


def genai_library() -> Any:
    """The engine; skips on Python 3.15, for which openvino-genai has no wheel."""
    return pytest.importorskip("conch_engines.genai.genai_library", reason="openvino-genai has no wheel")


def random_model(root: Path, name: str = "tiny", **parameters: str) -> Path:
    """Writes a language model with its config; returns its directory."""
    directory = _model(root, name, parameters)
    write_random_model(directory / "1" / "model.gguf")
    return directory


def random_vectors(root: Path, architecture: str, name: str = "vectors", **parameters: str) -> Path:
    """Writes a model for embeddings (``BertModel``) or scores (``BertForSequenceClassification``).

    Its tokens are letters; their vectors depend on their places.
    """
    openvino = import_openvino()

    directory = _model(root, name, parameters)
    folder = directory / "1"
    graph = _scores() if architecture.endswith("Classification") else _embeddings()
    openvino.save_model(graph, folder / "openvino_model.xml", compress_to_fp16=False)
    openvino.save_model(_tokenizer(), folder / "openvino_tokenizer.xml")
    config = {"architectures": [architecture], "max_position_embeddings": LONGEST, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return directory


def _model(root: Path, name: str, parameters: dict[str, str]) -> Path:
    directory = root / name
    (directory / "1").mkdir(parents=True)
    lines = ['backend: "openvino_genai"']
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (directory / "config.pbtxt").write_text("\n".join(lines))
    return directory


def _tokenizer() -> Any:
    """Letters as by BERT, with the template of pairs that the engine reads."""
    openvino = import_openvino()
    from openvino_tokenizers import tokenizer_pipeline as steps  # type: ignore[import-untyped]
    from openvino_tokenizers.utils import change_outputs_type  # type: ignore[import-untyped]

    pipeline = steps.TokenizerPipeline(vocab=_VOCABULARY)
    first, last = steps.AddToken("[CLS]", 1, 0), steps.AddToken("[SEP]", 2, 0)
    pipeline.add_steps(
        [
            steps.SpecialTokensSplit([steps.SpecialToken(each) for each in _WORDS]),
            steps.WhitespaceSplitStep(),
            steps.WordPieceTokenizationStep(_VOCABULARY),
            steps.TruncationStep(LONGEST - 2),
            steps.CombineSegmentsStep([first, steps.Sequence(0), last]),
            steps.PaddingStep("[PAD]", 0),
        ]
    )
    model = change_outputs_type(pipeline.get_tokenizer_ov_subgraph(), openvino.Type.i64)
    template = {
        "single": {"ids": [1, -1, 2], "type_ids": [0, 0, 0]},
        "pair": {"ids": [1, -1, 2, -1, 2], "type_ids": [0, 0, 0, 1, 1]},
    }
    model.set_rt_info(json.dumps(template), "processed_post_processor_template")
    return model


def _embeddings() -> Any:
    inputs, hidden = _hidden()
    return _graph(hidden, inputs, "last_hidden_state")


def _scores() -> Any:
    from openvino import opset13 as op

    inputs, hidden = _hidden()
    weights = np.random.default_rng(1).normal(size=(_WIDTH, 1)).astype(np.float32)
    summed = op.reduce_sum(hidden, op.constant([1]))
    return _graph(op.matmul(op.tanh(summed), op.constant(weights), False, False), inputs, "logits")


def _hidden() -> tuple[list[Any], Any]:
    """The inputs, and a vector for each token."""
    from openvino import opset13 as op

    inputs = [op.parameter([-1, -1], np.int64) for _ in range(3)]
    for each, name in zip(inputs, ("input_ids", "attention_mask", "token_type_ids"), strict=True):
        each.output(0).set_names({name})
    ids, mask, types = inputs
    table = np.random.default_rng(0).normal(size=(len(_VOCABULARY), _WIDTH)).astype(np.float32)
    tokens = op.gather(op.constant(table), ids, op.constant(0))
    place = op.unsqueeze(op.convert(op.add(types, op.cum_sum(mask, op.constant(1))), "f32"), op.constant(2))
    waves = op.sin(op.multiply(place, op.constant(np.arange(1, _WIDTH + 1, dtype=np.float32))))
    shown = op.unsqueeze(op.convert(mask, "f32"), op.constant(2))
    return inputs, op.multiply(op.add(tokens, waves), shown)


def _graph(result: Any, inputs: list[Any], name: str) -> Any:
    openvino = import_openvino()

    result.output(0).set_names({name})
    return openvino.Model([result], inputs, "random")
