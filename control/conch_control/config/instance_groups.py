"""Instance groups of a config: defaults, checks, conversion to the core."""

from __future__ import annotations

from conch.core.backend import Backend
from conch.core.execution.placement import MOST_INSTANCES, Devices, count_problem, filled, group_problem
from conch.core.spec import InstanceGroup, Resource
from conch.protocol.model_config_pb2 import ModelConfig, ModelInstanceGroup
from conch_control.config.problems import Problem, Problems


def read_groups(config: ModelConfig) -> tuple[InstanceGroup, ...]:
    """The groups as written."""
    return tuple(_read(group) for group in config.instance_group)


def resolving_groups(config: ModelConfig, devices: Devices, backend: Backend) -> Problems:
    """Yields the problems of instance groups, then fills in their defaults; idempotent."""
    yield from group_problems(config, devices, backend.cpu_instance_count, backend.uses_gpus)
    if not _kinds_known(config):
        return
    groups = filled(config.name, read_groups(config), devices, backend.cpu_instance_count, backend.uses_gpus)
    if not config.instance_group:
        config.instance_group.add()
    for entry, resolved in zip(config.instance_group, groups, strict=True):
        entry.name = resolved.name
        entry.kind = ModelInstanceGroup.Kind.Value(f"KIND_{resolved.kind}")  # type: ignore[assignment]
        entry.count = resolved.count
        entry.gpus[:] = resolved.gpus


def group_problems(
    config: ModelConfig, devices: Devices, cpu_count: int = 1, allows_gpus: bool = True
) -> Problems:
    """Reasons why instance groups can't be placed."""
    if not _kinds_known(config):
        for number, group in enumerate(config.instance_group):
            if group.kind not in ModelInstanceGroup.Kind.values():
                yield Problem(
                    f"instance_group[{number}].kind",
                    f"instance group {number} of model {config.name} has no known kind",
                    expected=f"one of {', '.join(ModelInstanceGroup.Kind.keys())}",
                )
        return
    groups = filled(config.name, read_groups(config), devices, cpu_count, allows_gpus)
    for number, resolved in enumerate(groups):
        message = group_problem(config.name, resolved, devices)
        if message is not None:
            written = f"instance_group[{number}]"
            yield Problem(
                f"{written}.gpus" if resolved.gpus else f"{written}.kind",
                message,
                expected=_possible(resolved, devices),
            )
    message = count_problem(config.name, groups)
    if message is not None:
        counts = [group.count for group in groups]
        yield Problem(
            f"instance_group[{counts.index(max(counts))}].count",
            message,
            expected=f"at most {MOST_INSTANCES}",
        )


def _kinds_known(config: ModelConfig) -> bool:
    """True if all kinds are valid; the text format allows any number."""
    return all(group.kind in ModelInstanceGroup.Kind.values() for group in config.instance_group)


def _possible(group: InstanceGroup, devices: Devices) -> str:
    if group.kind != "GPU":
        return f"no gpus, or KIND_GPU in place of KIND_{group.kind}"
    if not devices.gpus:
        return "KIND_CPU, or a machine with GPUs"
    return f"some of the GPUs {', '.join(str(gpu) for gpu in devices.gpus)}"


def _read(group: ModelInstanceGroup) -> InstanceGroup:
    limits = group.rate_limiter
    shared = "global"  # a Python keyword
    return InstanceGroup(
        name=group.name,
        kind=ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_"),
        count=group.count,
        gpus=tuple(group.gpus),
        passive=group.passive,
        profiles=tuple(group.profile),
        resources=tuple(Resource(each.name, each.count, getattr(each, shared)) for each in limits.resources),
        priority=max(limits.priority, 1),
    )
