"""The instance groups of a config, and the same as the core has them."""

from __future__ import annotations

from conch.core.backend import Backend
from conch.core.instances.placement import Devices, resolve
from conch.core.spec import InstanceGroup, Resource
from conch.protocol.model_config_pb2 import ModelConfig, ModelInstanceGroup


def read_groups(config: ModelConfig) -> tuple[InstanceGroup, ...]:
    """The groups as they stand in a config."""
    return tuple(_read(group) for group in config.instance_group)


def resolve_groups(config: ModelConfig, devices: Devices, backend: Backend) -> None:
    """Fills in the defaults of instance groups, and checks them; may be repeated.

    Args:
        config: The config; changed in place.
        devices: What the machine has.
        backend: The backend that is to run the model.

    Raises:
        InvalidArgumentError: A group can't be placed.
    """
    resolved = resolve(
        config.name, read_groups(config), devices, backend.cpu_instance_count, backend.uses_gpus
    )
    if not config.instance_group:
        config.instance_group.add()
    for written, group in zip(config.instance_group, resolved, strict=True):
        written.name = group.name
        written.kind = ModelInstanceGroup.Kind.Value(f"KIND_{group.kind}")  # type: ignore[assignment]
        written.count = group.count
        written.gpus[:] = group.gpus


def _read(group: ModelInstanceGroup) -> InstanceGroup:
    limits = group.rate_limiter
    shared = "global"  # a word of Python's
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
