"""Instance groups: defaults, checks, and the placements of their instances. Pure functions.

A configured group may leave out its kind, GPUs and count. `resolve` fills them in for the machine and rejects
impossible groups. The resolved groups are what a config shows, and `place` lists their instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from conch.core.errors import InvalidArgumentError
from conch.core.spec import InstanceGroup, Resource

MOST_INSTANCES = 1000
"""Limit of instances of a version on all devices: each takes memory, and perhaps a process."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a machine.

    Attributes:
        gpus: Numbers of its usable GPUs.
        min_compute_capability: Least compute capability of a usable GPU, for messages.
    """

    gpus: tuple[int, ...] = ()
    min_compute_capability: float = 6.0


InstanceKind = tuple[InstanceGroup, int]
"""Equal for interchangeable instances: a group without name, count and GPUs, and a device."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Name, device and resources of one instance.

    Attributes:
        name: Instance name, ``<group>_<index>``; the same on each GPU of a group.
        kind: ``CPU``, ``GPU`` or ``MODEL``.
        device_id: GPU number; 0 for other kinds.
        passive: True if the instance is created but never runs a batch.
        profiles: Optimisation profiles, for backends with them.
        resources: Resources needed to run a batch, with rate limits.
        priority: Its weight in the rate limiter.
    """

    name: str
    kind: str
    device_id: int = 0
    passive: bool = False
    profiles: tuple[str, ...] = ()
    resources: tuple[Resource, ...] = ()
    priority: int = 1


def resolve(
    model: str,
    groups: Iterable[InstanceGroup],
    devices: Devices,
    cpu_count: int = 1,
    allows_gpus: bool = True,
) -> tuple[InstanceGroup, ...]:
    """Fills in the defaults of a model's groups and checks them.

    Args:
        model: Name of the model.
        groups: As configured: a kind may be ``AUTO``, a count 0, a name or the GPUs empty.
        devices: Devices of the machine.
        cpu_count: Default count of a group on the CPU.
        allows_gpus: True if the backend uses GPUs by default.

    Raises:
        InvalidArgumentError: A group can't be placed; the text is Triton's.
    """
    resolved = filled(model, groups, devices, cpu_count, allows_gpus)
    for group in resolved:
        problem = group_problem(model, group, devices)
        if problem is not None:
            raise InvalidArgumentError(problem)
    problem = count_problem(model, resolved)
    if problem is not None:
        raise InvalidArgumentError(problem)
    return resolved


def filled(
    model: str,
    groups: Iterable[InstanceGroup],
    devices: Devices,
    cpu_count: int = 1,
    allows_gpus: bool = True,
) -> tuple[InstanceGroup, ...]:
    """Fills in defaults without checks; the arguments are those of `resolve`."""
    configured = tuple(groups) or (InstanceGroup(model, "AUTO", 0),)
    return tuple(
        _filled(model, number, group, devices, cpu_count, allows_gpus)
        for number, group in enumerate(configured)
    )


def group_problem(model: str, group: InstanceGroup, devices: Devices) -> str | None:
    """Error text if a filled group can't be placed, in Triton's words; else None."""
    problem = _problem(group, devices)
    return None if problem is None else f"instance group {group.name} of model {model} {problem}"


def count_problem(model: str, groups: Iterable[InstanceGroup]) -> str | None:
    """Error text if filled groups have more than `MOST_INSTANCES` instances; else None."""
    count = sum(group.count * len(devices_of(group)) for group in groups)
    if count <= MOST_INSTANCES:
        return None
    return (
        f"instance groups of model {model} ask for {count} instances, and a model may have at most "
        f"{MOST_INSTANCES}; lower 'count'"
    )


def _filled(
    model: str, number: int, group: InstanceGroup, devices: Devices, cpu_count: int, allows_gpus: bool
) -> InstanceGroup:
    kind, gpus = group.kind, group.gpus
    if kind == "AUTO":
        usable = allows_gpus and devices.gpus and set(gpus) <= set(devices.gpus)
        kind = "GPU" if usable else "CPU"
    if kind == "GPU" and not gpus:
        gpus = devices.gpus
    count = group.count if group.count > 0 else cpu_count if kind == "CPU" else 1
    return replace(group, name=group.name or f"{model}_{number}", kind=kind, count=count, gpus=gpus)


def _problem(group: InstanceGroup, devices: Devices) -> str | None:
    if group.kind != "GPU":
        return f"has kind KIND_{group.kind} but specifies one or more GPUs" if group.gpus else None
    if not group.gpus:
        return "has kind KIND_GPU but no GPUs are available"
    for gpu in group.gpus:
        if gpu not in devices.gpus:
            gpus = ", ".join(str(known) for known in devices.gpus)
            return (
                f"specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required "
                f"CUDA compute compatibility of {devices.min_compute_capability:f} are: {gpus}"
            )
    return None


def place(groups: Iterable[InstanceGroup]) -> list[Placement]:
    """The instances of all groups, in order; GPU groups have `count` on each GPU."""
    return [
        placement_of(group, f"{group.name}_{index}", device)
        for group in groups
        for index in range(group.count)
        for device in devices_of(group)
    ]


def placement_of(group: InstanceGroup, name: str, device: int) -> Placement:
    """The placement of an instance."""
    return Placement(name, group.kind, device, group.passive, group.profiles, group.resources, group.priority)


def devices_of(group: InstanceGroup) -> Sequence[int]:
    """The devices of a group; each has `count` instances."""
    return group.gpus if group.kind == "GPU" else (0,)


def counts_by_kind(groups: Iterable[InstanceGroup]) -> Counter[InstanceKind]:
    """Number of instances of each kind, whatever the names and order of the groups."""
    counts: Counter[InstanceKind] = Counter()
    for group in groups:
        for device in devices_of(group):
            counts[kind_of(group, device)] += group.count
    return counts


def kind_of(group: InstanceGroup, device: int) -> InstanceKind:
    """The kind of a group's instances on a device."""
    return replace(group, name="", count=1, gpus=()), device
