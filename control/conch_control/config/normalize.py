"""Fills in the defaults that Triton prints in a model's config."""

from __future__ import annotations

from conch.protocol.model_config_pb2 import ModelConfig, ModelInstanceGroup
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


def normalize_instance_groups(config: ModelConfig, gpu_count: int, cpu_instance_count: int) -> None:
    """Fills in the defaults of instance groups; decides what ``KIND_AUTO`` means here.

    Args:
        config: The config; changed in place.
        gpu_count: Number of usable GPUs.
        cpu_instance_count: Instances of a CPU group that names no count; the backend's choice.
    """
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for number, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{number}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            usable = gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus)
            group.kind = ModelInstanceGroup.KIND_GPU if usable else ModelInstanceGroup.KIND_CPU
        if group.count < 1:
            group.count = cpu_instance_count if group.kind == ModelInstanceGroup.KIND_CPU else 1
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpu_count))
