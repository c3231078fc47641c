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
from conch.workers.host.native_words import KINDS

if TYPE_CHECKING:
    from conch.workers.host.native_library import HostLibrary

log = logging.getLogger(__name__)

_PARALLEL = "TRITON_PARALLEL_INSTANCE_LOADING"
"""Variable that overrides what the backend says: ``0`` or ``1``."""


def open_instances(host: HostLibrary, placements: Sequence[Placement], facts: Mapping[str, Any]) -> None:
    """Opens all instances, at the same time if the backend allows it.

    Args:
        host: The library, with its model.
        placements: The instances.
        facts: What the library says of itself.

    Raises:
        ConchError: A ModelInstanceInitialize failed; the first of them in the order of the instances.
    """
    parallel = {"0": False, "1": True}.get(os.environ.get(_PARALLEL, ""), facts.get("parallel_instances"))
    if not parallel:
        for index, placement in enumerate(placements):
            _open(host, index, placement)
        return
    with ThreadPoolExecutor(len(placements), "conch-native-open") as pool:
        opened = [pool.submit(_open, host, *each) for each in enumerate(placements)]
    for each in opened:
        each.result()


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


def _open(host: HostLibrary, index: int, placement: Placement) -> None:
    try:
        host.open_instance(
            index,
            placement.name,
            KINDS.index(placement.kind),
            placement.device_id,
            placement.passive,
            json.dumps({_policy(placement): {}}),
            placement.profiles,
        )
    except ConchError as error:
        log.error("ERROR: Failed to create instance: %s", error.message)
        raise


def _policy(placement: Placement) -> str:
    """The name of an instance's host policy."""
    return f"gpu_{placement.device_id}" if placement.kind == "GPU" else placement.kind.lower()
