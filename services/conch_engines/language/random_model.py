"""A random Llama of 2 layers with a vocabulary of bytes, for checks of grammars and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conch_engines.language.gguf_file import write_gguf

CONTEXT = 2048
_WIDTH, _LAYERS, _HEADS, _INNER = 64, 2, 4, 128
_MERGES = ("t h", "th e", "Ġ a", "i n", "in g", "o n", "Ġ the")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_random_model(path: Path, seed: int = 7) -> None:
    """Writes the model as a GGUF file of 240 KB."""
    write_gguf(path, *random_parts(seed))


def random_parts(seed: int = 7) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's metadata, and its tensors as arrays of float16 and float32."""
    tokens = [*_SPECIAL, *_byte_characters(), *(merge.replace(" ", "") for merge in _MERGES)]
    metadata = {
        "general.architecture": "llama",
        "general.name": "random",
        "general.file_type": 1,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": _WIDTH,
        "llama.block_count": _LAYERS,
        "llama.feed_forward_length": _INNER,
        "llama.attention.head_count": _HEADS,
        "llama.attention.head_count_kv": _HEADS,
        "llama.rope.dimension_count": _WIDTH // _HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)),
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": _TEMPLATE,
    }
    return metadata, _tensors(len(tokens), np.random.default_rng(seed))


def _tensors(vocabulary: int, random: np.random.Generator) -> dict[str, Any]:
    def matrix(rows: int, columns: int) -> Any:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float16)

    ones = np.ones(_WIDTH, np.float32)
    found = {"token_embd.weight": matrix(vocabulary, _WIDTH)}
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            found[f"blk.{layer}.{name}.weight"] = matrix(_WIDTH, _WIDTH)
        found[f"blk.{layer}.ffn_gate.weight"] = matrix(_INNER, _WIDTH)
        found[f"blk.{layer}.ffn_up.weight"] = matrix(_INNER, _WIDTH)
        found[f"blk.{layer}.ffn_down.weight"] = matrix(_WIDTH, _INNER)
        found[f"blk.{layer}.attn_norm.weight"] = found[f"blk.{layer}.ffn_norm.weight"] = ones
    return {**found, "output_norm.weight": ones, "output.weight": matrix(vocabulary, _WIDTH)}


def _byte_characters() -> list[str]:
    """The characters that stand for bytes in byte-level BPE, in the order of the bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
