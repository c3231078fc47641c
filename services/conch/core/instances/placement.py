"""Which instances a model gets, and on which devices: a pure function of its groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conch.core.spec import InstanceGroup


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one instance lives.

    Attributes:
        name: Instance name, ``<group>_<index>``.
        kind: ``CPU``, ``GPU`` or ``MODEL``.
        device_id: GPU number; 0 for other kinds.
    """

    name: str
    kind: str
    device_id: int = 0


def place(groups: Iterable[InstanceGroup]) -> list[Placement]:
    """The instances of all groups, in the order of the groups; GPU groups get `count` on each GPU."""
    placements: list[Placement] = []
    for group in groups:
        devices = group.gpus if group.kind == "GPU" else (0,)
        slots = ((index, device) for device in devices for index in range(group.count))
        placements.extend(
            Placement(f"{group.name}_{number}", group.kind, device)
            for number, (_, device) in enumerate(slots)
        )
    return placements
