"""Fills in the defaults that Triton prints in a model's config."""

from __future__ import annotations

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.sequences import normalize_sequences


def normalize(config: ModelConfig) -> None:
    """Fills in all defaults but those of instance groups; may be repeated after completion."""
    if config.version_policy.WhichOneof("policy_choice") in (None, "latest"):
        latest = config.version_policy.latest
        latest.num_versions = latest.num_versions or 1
    if config.HasField("dynamic_batching"):
        preferred = config.dynamic_batching.preferred_batch_size
        if not preferred and config.max_batch_size > 0:
            preferred.append(config.max_batch_size)
    normalize_sequences(config)
    if not config.HasField("ensemble_scheduling"):
        for memory in ("input_pinned_memory", "output_pinned_memory"):
            if not config.optimization.HasField(memory):
                getattr(config.optimization, memory).enable = True
