"""GGUF files for the backend llama_cpp: random weights in several kinds of tensors, and adapters."""

from __future__ import annotations

import ctypes
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from conch_engines.language.random_model import random_parts, write_random_model

K_QUANTS = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K)


def llama_model(root: Path, name: str = "tiny", **parameters: str) -> Path:
    """Writes a random model with its config; returns its directory."""
    directory = root / name
    (directory / "1").mkdir(parents=True)
    lines = ['backend: "llama_cpp"']
    for key, value in {"num_threads": "1", **parameters}.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (directory / "config.pbtxt").write_text("\n".join(lines))
    write_random_model(directory / "1" / "model.gguf")
    return directory


def write_kind(path: Path, kind: str) -> None:
    """Writes the random model, or a wider one for K-quants, with matrices of a kind such as ``Q8_0``."""
    metadata, tensors = random_parts()
    wanted = GGMLQuantizationType[kind]
    if wanted in K_QUANTS:
        metadata, tensors = _widened(metadata, tensors)
    kinds = {name: wanted if array.ndim == 2 else GGMLQuantizationType.F32 for name, array in tensors.items()}
    write_tensors(path, metadata, tensors, kinds)


def _widened(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The random model with rows that fill the blocks of K-quants."""
    random = np.random.default_rng(7)
    wide, found = GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K][0], {}
    narrow = (metadata["llama.embedding_length"], metadata["llama.feed_forward_length"])
    for name, array in tensors.items():
        shape = [wide if each in narrow else each for each in array.shape]
        found[name] = np.ones(shape) if array.ndim == 1 else random.normal(0, array.std(), shape)
    sizes = dict.fromkeys(("llama.embedding_length", "llama.feed_forward_length"), wide)
    heads = metadata["llama.attention.head_count"]
    return {**metadata, **sizes, "llama.rope.dimension_count": wide // heads}, found


def write_adapter(path: Path, seed: int) -> None:
    """Writes a LoRA adapter of the random model that changes its answers."""
    _, tensors = random_parts()
    random = np.random.default_rng(seed)
    weights = {}
    for name, array in tensors.items():
        if name.endswith("ffn_down.weight"):
            rows, columns = array.shape
            weights[f"{name}.lora_a"] = random.normal(0, 0.3, (4, columns)).astype(np.float32)
            weights[f"{name}.lora_b"] = random.normal(0, 0.3, (rows, 4)).astype(np.float32)
    metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 4.0,
    }
    write_tensors(path, metadata, weights, dict.fromkeys(weights, GGMLQuantizationType.F32))


def write_tensors(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    kinds: Mapping[str, GGMLQuantizationType],
) -> None:
    """Writes a file."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        kind = kinds[name]
        writer.add_tensor(name, _encode(array.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _encode(array: Any, kind: GGMLQuantizationType) -> Any:
    """The bytes of a tensor; K-quants are made by the engine's library, as gguf has none."""
    if kind not in K_QUANTS:
        return quantize(array, kind)
    elements, size = GGML_QUANT_SIZES[kind]
    rows, columns = array.shape
    array, found = np.ascontiguousarray(array), np.zeros((rows, columns // elements * size), np.uint8)
    call = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    assert call(kind, array.ctypes.data, found.ctypes.data, 0, rows, columns, None) == found.nbytes
    return found


_WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"▁{each}" for each in string.ascii_lowercase))
_WIDTH, _INNER, _PLACES = 32, 64, 64


def write_reranker(path: Path) -> None:
    """Writes a random BERT of one layer that scores pairs of texts; its tokens are letters as words."""
    random = np.random.default_rng(5)

    def array(*shape: int) -> Any:
        return random.normal(0, 0.5, shape).astype(np.float32)

    metadata = {
        "general.architecture": "bert",
        "bert.context_length": _PLACES,
        "bert.embedding_length": _WIDTH,
        "bert.block_count": 1,
        "bert.feed_forward_length": _INNER,
        "bert.attention.head_count": 2,
        "bert.attention.layer_norm_epsilon": 1e-6,
        "bert.attention.causal": False,
        "bert.pooling_type": 4,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.tokens": list(_WORDS),
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * 26],
        "tokenizer.ggml.cls_token_id": 1,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
    tensors = {
        "token_embd.weight": array(len(_WORDS), _WIDTH),
        "token_types.weight": array(2, _WIDTH),
        "position_embd.weight": array(_PLACES, _WIDTH),
        "cls.weight": array(_WIDTH, _WIDTH),
        "cls.bias": array(_WIDTH),
        "cls.output.weight": array(1, _WIDTH),
        "cls.output.bias": array(1),
    }
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
        rows, columns = {"ffn_up": (_INNER, _WIDTH), "ffn_down": (_WIDTH, _INNER)}.get(name, (_WIDTH, _WIDTH))
        tensors[f"blk.0.{name}.weight"], tensors[f"blk.0.{name}.bias"] = array(rows, columns), array(rows)
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = np.ones(_WIDTH, np.float32), array(_WIDTH)
    write_tensors(path, metadata, tensors, dict.fromkeys(tensors, GGMLQuantizationType.F32))
