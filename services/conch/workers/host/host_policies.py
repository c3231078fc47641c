"""Host policies: the processors and memory of the threads that load and run an instance of a library."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from conch.core.errors import UnavailableError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec

_CORES, _NODE = "cpu-cores", "numa-node"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call, by machine."""
_DEFAULT, _BIND = 0, 2
_WORD_BITS = 64

Policy = Mapping[str, str]
"""Settings of a policy: ``cpu-cores`` such as ``0-3``, ``numa-node``, and what only the backend reads."""


def policy_name(spec: ModelSpec, placement: Placement) -> str:
    """The policy of an instance: that of its group, or the one of its device."""
    name, _, _ = placement.name.rpartition("_")
    groups = cast("Sequence[Mapping[str, object]]", spec.config.get("instance_group") or ())
    given = next((group.get("host_policy") for group in groups if group.get("name") == name), None)
    if isinstance(given, str) and given:
        return given
    return f"gpu_{placement.device_id}" if placement.kind == "GPU" else placement.kind.lower()


def bind(name: str, policy: Policy) -> None:
    """Binds the calling thread, and what it allocates from now on.

    Raises:
        UnavailableError: The machine has no such processors or node, or does not allow it.
    """
    try:
        if _CORES in policy:
            first, _, last = policy[_CORES].partition("-")
            os.sched_setaffinity(0, range(int(first), int(last) + 1))
        if _NODE in policy:
            _set_memory(_BIND, int(policy[_NODE]))
    except (OSError, ValueError, OverflowError) as error:
        raise UnavailableError(
            f"host policy '{name}' ({', '.join(f'{key}={value}' for key, value in policy.items())}) can't be "
            f"applied: {error}"
        ) from None


@contextmanager
def bound(name: str, policy: Policy) -> Iterator[None]:
    """Binds the calling thread for a while.

    Raises:
        UnavailableError: As `bind`.
    """
    before = os.sched_getaffinity(0)
    try:
        bind(name, policy)
        yield
    finally:
        if _CORES in policy:
            os.sched_setaffinity(0, before)
        if _NODE in policy:
            try:
                _set_memory(_DEFAULT, None)
            except OSError:
                pass  # then it was not set either


def _set_memory(mode: int, node: int | None) -> None:
    """Calls ``set_mempolicy``."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"memory can't be bound on {platform.machine()}")
    words = 0 if node is None else node // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    if node is not None:
        mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, mode, mask if words else None, ctypes.c_ulong(words * _WORD_BITS + bool(words))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
