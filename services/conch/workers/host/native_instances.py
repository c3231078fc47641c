"""Opens the instances of a library, and tells which of them share a thread."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from conch.core.errors import ConchError
from conch.core.execution.placement import Placement
from conch.workers.host.host_policies import Policy, bound
from conch.workers.host.native_words import KINDS

if TYPE_CHECKING:
    from conch.workers.host.native_library import HostLibrary

log = logging.getLogger(__name__)

_PARALLEL = "TRITON_PARALLEL_INSTANCE_LOADING"
"""Variable that overrides what the backend says: ``0`` or ``1``."""


def open_instances(
    host: HostLibrary,
    placements: Sequence[Placement],
    policies: Sequence[tuple[str, Policy]],
    facts: Mapping[str, Any],
) -> None:
    """Opens all instances, at the same time if the backend allows it.

    Args:
        host: The library, with its model.
        placements: The instances.
        policies: Their host policies, by name.
        facts: Properties that the library reports.

    Raises:
        ConchError: A ModelInstanceInitialize failed; the first of them in the order of the instances.
    """
    parallel = {"0": False, "1": True}.get(os.environ.get(_PARALLEL, ""), facts.get("parallel_instances"))
    instances = list(zip(range(len(placements)), placements, policies, strict=True))
    if not parallel:
        for each in instances:
            _open(host, *each)
        return
    with ThreadPoolExecutor(len(placements), "conch-native-open") as pool:
        opened = [pool.submit(_open, host, *each) for each in instances]
    for future in opened:
        future.result()


def threads_of(
    placements: Sequence[Placement], facts: Mapping[str, Any], model: str, in_sequences: bool
) -> list[int]:
    """For each instance the number of the first one with which it shares its thread.

    A backend that is DEVICE_BLOCKING has one thread for all instances on a GPU.
    """
    apart = list(range(len(placements)))
    if not facts.get("device_blocking"):
        return apart
    if in_sequences:
        log.info(
            'Overriding execution policy to "TRITONBACKEND_EXECUTION_BLOCKING" for sequence model "%s"', model
        )
        return apart
    first: dict[int, int] = {}
    return [
        first.setdefault(placement.device_id, number) if placement.kind == "GPU" else number
        for number, placement in enumerate(placements)
    ]


def _open(host: HostLibrary, index: int, placement: Placement, named: tuple[str, Policy]) -> None:
    name, policy = named
    try:
        with bound(name, policy):
            host.open_instance(
                index,
                placement.name,
                KINDS.index(placement.kind),
                placement.device_id,
                placement.passive,
                json.dumps({name: dict(policy)}),
                placement.profiles,
            )
    except ConchError as error:
        log.error("ERROR: Failed to create instance: %s", error.message)
        raise
