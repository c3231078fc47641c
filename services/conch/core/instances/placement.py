"""Instance groups: their defaults, their rules, and the instances they stand for. Pure functions.

A group goes through here twice. As it is configured it may say nothing about its kind, its GPUs or its
count; `resolve` decides that for the machine at hand, and refuses what can't be. What comes out, and what a
config shows from then on, is a list of groups that `place` makes instances of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from conch.core.errors import InvalidArgumentError
from conch.core.spec import InstanceGroup, Resource


@dataclass(frozen=True, slots=True)
class Devices:
    """What a machine has.

    Attributes:
        gpus: Numbers of its usable GPUs.
        min_compute_capability: Least compute capability that makes a GPU usable, for messages.
    """

    gpus: tuple[int, ...] = ()
    min_compute_capability: float = 6.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one instance lives.

    Attributes:
        name: Instance name, ``<group>_<index>``; the same on each GPU of a group.
        kind: ``CPU``, ``GPU`` or ``MODEL``.
        device_id: GPU number; 0 for other kinds.
        passive: Whether the instance is made but never given a batch.
        profiles: Optimisation profiles, for backends that have them.
        resources: What the instance needs to run a batch, where rates are limited.
        priority: Its weight there.
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
        devices: What the machine has.
        cpu_count: Instances of a group on the CPU that names no count.
        allows_gpus: Whether the backend takes a GPU where a group leaves the choice.

    Raises:
        InvalidArgumentError: A group can't be placed; the text is Triton's.
    """
    resolved = filled(model, groups, devices, cpu_count, allows_gpus)
    for group in resolved:
        problem = group_problem(model, group, devices)
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
    """A model's groups with their defaults, not checked; the arguments are those of `resolve`."""
    configured = tuple(groups) or (InstanceGroup(model, "AUTO", 0),)
    return tuple(
        _filled(model, number, group, devices, cpu_count, allows_gpus)
        for number, group in enumerate(configured)
    )


def group_problem(model: str, group: InstanceGroup, devices: Devices) -> str | None:
    """Why a group that has its defaults can't be placed, in Triton's words; None if it can."""
    problem = _problem(group, devices)
    return None if problem is None else f"instance group {group.name} of model {model} {problem}"


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
    """The instances of all groups, in the order of the groups; GPU groups get `count` on each GPU."""
    return [
        placement_of(group, f"{group.name}_{index}", device)
        for group in groups
        for index in range(group.count)
        for device in devices_of(group)
    ]


def placement_of(group: InstanceGroup, name: str, device: int) -> Placement:
    """An instance of a group on a device."""
    return Placement(name, group.kind, device, group.passive, group.profiles, group.resources, group.priority)


def devices_of(group: InstanceGroup) -> Sequence[int]:
    """The devices that each have all instances of a group."""
    return group.gpus if group.kind == "GPU" else (0,)


def differ_in_count_only(old: Sequence[InstanceGroup], new: Sequence[InstanceGroup]) -> bool:
    """Whether two lists of groups are the same but for the groups' counts, and perhaps names."""

    def rest(groups: Sequence[InstanceGroup]) -> list[InstanceGroup]:
        return [replace(group, name="", count=1) for group in groups]

    def counts(groups: Sequence[InstanceGroup]) -> list[int]:
        return [group.count for group in groups]

    return rest(old) == rest(new) and counts(old) != counts(new)
