"""Settings of the engine from parameters of the config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_engines.model_config import boolean, integer

LORA_FILES = "lora_files"
LONGEST = "max_model_len"
_SLOTS, _BATCH = "max_num_seqs", "max_num_batched_tokens"
PARAMETERS = (
    *(LONGEST, _SLOTS, _BATCH, "enable_prefix_caching"),
    *("num_threads", "n_gpu_layers", LORA_FILES),
)
DEFAULT_LONGEST = 8192
"""Most tokens of a request without `max_model_len`, if the model has as many: the cache takes memory."""


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings of one model.

    Attributes:
        max_model_len: Most tokens of prompt and answer of one request; 0 for the model's, up to
            `DEFAULT_LONGEST`.
        max_num_seqs: Slots: requests that run at a time.
        max_num_batched_tokens: Tokens of a prompt that a step takes; other requests wait meanwhile.
        enable_prefix_caching: True if a slot keeps the cache of common beginnings.
        num_threads: Threads of the engine; 0 for the processors that the worker may use.
        n_gpu_layers: Layers on a GPU; -1 for as many as the engine chooses.
        lora_files: GGUF files of LoRA adapters by the names that requests give.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    num_threads: int
    n_gpu_layers: int
    lora_files: Mapping[str, str]

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> LlamaSettings:
        """Reads parameters. Raises InvalidArgumentError: a value is invalid; the text names it."""
        slots, batch = integer(parameters, _SLOTS, 4, 1), integer(parameters, _BATCH, 256, 2)
        if batch < slots:
            raise InvalidArgumentError(
                f"parameter '{_BATCH}' must be at least '{_SLOTS}', {slots}, as each slot has a token in a "
                f"step, got '{batch}'"
            )
        return cls(
            max_model_len=integer(parameters, LONGEST, 0, 0),
            max_num_seqs=slots,
            max_num_batched_tokens=batch,
            enable_prefix_caching=boolean(parameters, "enable_prefix_caching", True),
            num_threads=integer(parameters, "num_threads", 0, 0),
            n_gpu_layers=integer(parameters, "n_gpu_layers", -1, -1),
            lora_files=_lora_files(parameters.get(LORA_FILES, "")),
        )

    @property
    def threads(self) -> int:
        """Threads of the engine: never more than processors, as they spin."""
        return self.num_threads or len(os.sched_getaffinity(0))

    def context_length(self, trained: int | None) -> int:
        """Most tokens of one request.

        Args:
            trained: Tokens of the context with which the model was trained; None if its file does not say.

        Raises:
            InvalidArgumentError: More are asked for than the model was trained with.
        """
        if trained is not None and self.max_model_len > trained:
            raise InvalidArgumentError(
                f"parameter '{LONGEST}' must be at most {trained}, with which the model was trained, got "
                f"'{self.max_model_len}'"
            )
        return self.max_model_len or min(trained or DEFAULT_LONGEST, DEFAULT_LONGEST)

    def lora_paths(self, directory: Path) -> dict[str, Path]:
        """The files of adapters. Raises InvalidArgumentError: one is not in the version's directory."""
        found = {}
        for name, file in self.lora_files.items():
            path = directory / file
            if not path.resolve().is_relative_to(directory.resolve()) or not path.is_file():
                raise InvalidArgumentError(f"parameter '{LORA_FILES}': there is no file '{path}'")
            found[name] = path
        return found


def _lora_files(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in filter(None, (each.strip() for each in text.split(","))):
        name, equals, file = entry.partition("=")
        if not equals or not name.strip() or not file.strip() or name.strip() in found:
            raise InvalidArgumentError(
                f"parameter '{LORA_FILES}': must be pairs name=file.gguf with names of their own, separated "
                f"by commas, not '{text}'"
            )
        found[name.strip()] = file.strip()
    return found
