"""Memory of GPUs, by process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of one GPU's memory, in bytes.

    Attributes:
        used: By all.
        processes: By process id, as far as the driver tells.
    """

    used: int
    processes: Mapping[int, int] = field(default_factory=dict)


class GpuMemory(Protocol):
    """The GPUs of a machine; thread-safe."""

    def read(self, device: int) -> GpuUse:
        """Use of a GPU, by its number for CUDA; all zero while the driver does not answer."""

    def close(self) -> None:
        """Closes the library."""
