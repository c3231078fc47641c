"""The task of a GGUF file, and how one for embeddings pools, from its metadata and from parameters."""

from __future__ import annotations

from collections.abc import Mapping

from conch.core.errors import InvalidArgumentError
from conch_engines.llama_cpp import llama_settings
from conch_engines.llama_cpp.llama_file import LlamaFile
from conch_engines.llama_cpp.llama_settings import LONGEST
from conch_llm.models import answer_parsers

GENERATE, EMBED, SCORE = "generate", "embed", "score"
TASK = "CONCH_TASK"
POOLING = "pooling"
PARAMETERS = (TASK, POOLING)

_POOLINGS = {"mean": 1, "cls": 2, "last_token": 3}
"""Poolings by llama.cpp's numbers."""
_RANK = 4
_NUMBERS = {number: name for name, number in _POOLINGS.items()}
_ENCODERS = ("bert", "t5encoder", "gemma-embedding", "llama-embed")
"""Ends of architectures that make vectors only."""
_OF_VECTORS = (*PARAMETERS, LONGEST, "max_num_seqs", "num_threads", "n_gpu_layers")


def find_task(file: LlamaFile, parameters: Mapping[str, str]) -> str:
    """Finds the task of a file.

    Raises:
        InvalidArgumentError: The parameter has none that is known.
    """
    asked = parameters.get(TASK, "")
    if asked:
        if asked not in (GENERATE, EMBED, SCORE):
            raise InvalidArgumentError(f"parameter '{TASK}' must be generate, embed or score, not '{asked}'")
        return asked
    pooling = file.of_architecture("pooling_type")
    if pooling == _RANK:
        return SCORE
    encodes = any(part in file.architecture for part in _ENCODERS)
    return EMBED if encodes or pooling in _NUMBERS else GENERATE


def pooling_of(file: LlamaFile, parameters: Mapping[str, str]) -> str:
    """The pooling of token vectors to a text's vector.

    Raises:
        InvalidArgumentError: The parameter has none that is known, or neither it nor the file says.
    """
    asked = parameters.get(POOLING, "")
    if not asked:
        asked = _NUMBERS.get(file.of_architecture("pooling_type") or 0, "")
        if not asked:
            raise InvalidArgumentError(
                f"'{file.path}' does not say how tokens make a vector: set parameter '{POOLING}' to "
                f"{', '.join(_POOLINGS)}"
            )
    if asked not in _POOLINGS:
        raise InvalidArgumentError(
            f"parameter '{POOLING}' must be one of {', '.join(_POOLINGS)}, not '{asked}'"
        )
    return asked


def check_task(file: LlamaFile, parameters: Mapping[str, str]) -> None:
    """Raises InvalidArgumentError: a parameter has no effect for the file's task, or a pooling is missing."""
    task = find_task(file, parameters)
    if task == GENERATE:
        unused = {POOLING}
    else:
        unused = {*llama_settings.PARAMETERS, *answer_parsers.PARAMETERS}.difference(_OF_VECTORS)
        if task == SCORE:
            unused.add(POOLING)
        else:
            pooling_of(file, parameters)
    for name in sorted(unused.intersection(parameters)):
        raise InvalidArgumentError(f"parameter '{name}' has no effect for a model of the task '{task}'")
