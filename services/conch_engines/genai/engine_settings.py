"""Settings of the engine from parameters of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError
from conch_engines.model_config import boolean, integer

PARAMETERS = (
    *("device", "cache_size_gb", "max_num_batched_tokens", "max_num_seqs", "dynamic_split_fuse"),
    *("enable_prefix_caching", "max_model_len", "num_threads"),
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one model.

    Attributes:
        device: OpenVINO's device.
        cache_size_gb: Size of the KV cache in GB; 0 for one that grows.
        max_num_batched_tokens: Most tokens of one step.
        max_num_seqs: Most choices of one step.
        dynamic_split_fuse: True if prompts are split over steps and share them with running choices.
        enable_prefix_caching: True if the KV cache of common beginnings is kept.
        max_model_len: Most tokens of prompt and answer; 0 for the model's.
        num_threads: Threads of the engine; 0 for its own choice.
    """

    device: str
    cache_size_gb: int
    max_num_batched_tokens: int
    max_num_seqs: int
    dynamic_split_fuse: bool
    enable_prefix_caching: bool
    max_model_len: int
    num_threads: int

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> EngineSettings:
        """Reads parameters. Raises InvalidArgumentError: a value is invalid; the text names it."""
        device = parameters.get("device", "CPU")
        if not device.strip():
            raise InvalidArgumentError("parameter 'device' must name a device of OpenVINO, such as 'CPU'")
        return cls(
            device=device,
            cache_size_gb=integer(parameters, "cache_size_gb", 1, 0),
            max_num_batched_tokens=integer(parameters, "max_num_batched_tokens", 256, 1),
            max_num_seqs=integer(parameters, "max_num_seqs", 256, 1),
            dynamic_split_fuse=boolean(parameters, "dynamic_split_fuse", True),
            enable_prefix_caching=boolean(parameters, "enable_prefix_caching", True),
            max_model_len=integer(parameters, "max_model_len", 0, 0),
            num_threads=integer(parameters, "num_threads", 0, 0),
        )
