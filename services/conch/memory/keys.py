"""Which names of shared-memory objects a client may give, and which part of a region; no system calls."""

from __future__ import annotations

from conch.core.errors import InvalidArgumentError

_LONGEST_NAME = 255
_MOST_BYTES = 2**64 - 1

_RESERVED = (
    "triton_python_backend_shm_region_",
    "conch_",
    "sem.",  # named semaphores: whoever writes to one can hang a process
    "nccl-",  # what libraries on GPUs share between the processes of a machine
    "cuda.shm.",
)
"""What the names of objects begin with that are servers' own, or their libraries'."""


def object_name(region: str, key: str) -> str:
    """The name of the shared-memory object that a key stands for, as `shm_open` reads it.

    Args:
        region: Name of the region it is to be, for the error.
        key: The key, with or without slashes in front.

    Raises:
        InvalidArgumentError: No client may name such an object.
    """
    name = key.lstrip("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name or _length(name) > _LONGEST_NAME:
        raise InvalidArgumentError(
            f"cannot register shared memory region '{region}' - invalid shm key '{key}'"
        )
    for prefix in _RESERVED:
        if name.startswith(prefix):
            raise InvalidArgumentError(
                f"cannot register shared memory region '{region}' with key '{key}' as the key contains the "
                f"reserved prefix '{prefix}'"
            )
    return name


def _length(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return _LONGEST_NAME + 1


def check_part(region: str, region_size: int, offset: int, byte_size: int) -> None:
    """Checks that a part lies in a region.

    Args:
        region: Name of the region, for the error.
        region_size: Its size in bytes.
        offset: Where the part begins.
        byte_size: Its size in bytes.

    Raises:
        InvalidArgumentError: It does not, or is empty; texts are Triton's.
    """
    if not 0 <= offset < region_size:
        raise InvalidArgumentError(f"Invalid offset for shared memory region: '{region}'")
    unsigned = byte_size if byte_size >= 0 else byte_size + _MOST_BYTES + 1  # as Triton reads a gRPC int64
    if unsigned > _MOST_BYTES - offset:
        raise InvalidArgumentError(
            f"Integer overflow detected: byte_size ({unsigned}) + offset ({offset}) exceeds maximum value "
            f"({_MOST_BYTES}) for region '{region}'"
        )
    if not 0 < byte_size <= region_size - offset:
        raise InvalidArgumentError(f"Invalid offset + byte size for shared memory region: '{region}'")
