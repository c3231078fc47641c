"""Finds valid settings that have no effect."""

from __future__ import annotations

from collections.abc import Sequence

from conch.protocol.model_config_pb2 import ModelConfig, ModelQueuePolicy
from conch_control.config.problems import Problem, Problems, entry_path, nearest

_OWN = "CONCH_"
_PARAMETERS = ("CONCH_CACHE_TTL", "CONCH_MAX_QUEUE_SIZE", "CONCH_PADDING")


def ineffective_settings(config: ModelConfig, of_backend: Sequence[str] = ()) -> Problems:
    """Settings of an effective config that have no effect, as problems that fail no load."""
    yield from _batching_advice(config)
    for number, group in enumerate(config.instance_group):
        for field in ("host_policy", "secondary_devices"):
            if getattr(group, field):
                path = f"instance_group[{number}].{field}"
                yield Problem(path, f"{field} is accepted and has no effect in this version")
    for number, sample in enumerate(config.model_warmup):
        if not sample.batch_size:
            yield Problem(
                f"model_warmup[{number}].batch_size",
                f"warmup sample '{sample.name}' is not run: its batch_size is 0",
                expected="at least 1",
            )
    known = sorted([*_PARAMETERS, *of_backend])
    begins = tuple(name for name in known if name.endswith("_"))
    for key in sorted(config.parameters):
        if key.startswith(_OWN) and key not in known and not (begins and key.startswith(begins)):
            yield Problem(
                entry_path("parameters", key),
                f"parameter '{key}' is unknown and has no effect",
                expected="one of " + ", ".join(f"{name}..." if name in begins else name for name in known),
                found=f"'{key}'",
                nearest=nearest(key, known),
            )
    if config.backend == "python":
        for field in ("batch_input", "batch_output"):
            if getattr(config, field):
                yield Problem(
                    field,
                    f"{field} has no effect for a Python model, which gets each request as it is",
                )


def _batching_advice(config: ModelConfig) -> Problems:
    if not config.HasField("dynamic_batching"):
        return
    batching = config.dynamic_batching
    policies = {"dynamic_batching.default_queue_policy": batching.default_queue_policy} | {
        entry_path("dynamic_batching.priority_queue_policy", level): batching.priority_queue_policy[level]
        for level in sorted(batching.priority_queue_policy)
    }
    used = batching.preserve_ordering or any(_has_limits(policy) for policy in policies.values())
    if config.max_batch_size == 0 and config.input and not (used or batching.preferred_batch_size):
        yield Problem(
            "dynamic_batching",
            "dynamic_batching has no effect without max_batch_size: there is nothing to batch along",
            expected="max_batch_size > 0",
            found="0",
        )
    if batching.priority_queue_policy and not batching.priority_levels:
        yield Problem(
            "dynamic_batching.priority_queue_policy",
            "priority_queue_policy has no effect without priority_levels",
            expected="priority_levels > 0",
        )
    for path, policy in policies.items():
        yield from _policy_advice(path, policy)


def _has_limits(policy: ModelQueuePolicy) -> bool:
    return bool(policy.default_timeout_microseconds or policy.max_queue_size)


def _policy_advice(path: str, policy: ModelQueuePolicy) -> Problems:
    if policy.default_timeout_microseconds:
        return
    if policy.allow_timeout_override:
        yield Problem(
            f"{path}.allow_timeout_override",
            "allow_timeout_override has no effect without default_timeout_microseconds, which requests may "
            "only shorten",
            expected="default_timeout_microseconds > 0",
        )
    if policy.timeout_action:
        yield Problem(
            f"{path}.timeout_action",
            "timeout_action has no effect without default_timeout_microseconds",
            expected="default_timeout_microseconds > 0",
        )
