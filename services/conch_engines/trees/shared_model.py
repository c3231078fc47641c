"""A loaded model of which all instances use one function, and what its signature may look like.

Forests have no state, so instances differ in nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from conch.backends.arrays import ArrayInstance
from conch.backends.signature import ModelTensor
from conch.core.backend import BackendInstance, BackendModel, ConfigNotes
from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec
from conch.core.tensor import Array

log = logging.getLogger(__name__)

MAX_BATCH_SIZE = 32768
"""Completed ``max_batch_size``: rows cost little, and Triton's documentation advises as much."""

_SCHEDULERS = ("dynamic_batching", "sequence_batching")


class SharedFunction(ABC):
    """An `ArrayFunction` that all instances call; it has no `close`, which each of them would call."""

    @abstractmethod
    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...], /) -> dict[str, Array]:
        """The requested outputs."""

    @abstractmethod
    def release(self) -> None:
        """Frees the model, once nothing runs."""


class SharedModel(BackendModel):
    """Creates instances that call one function.

    Args:
        spec: The spec that inputs are gathered and outputs scattered by.
        function: Called by several threads at the same time.
        warnings: Choices that the config leaves open.
    """

    def __init__(self, spec: ModelSpec, function: SharedFunction, warnings: Iterable[str] = ()) -> None:
        self._notes = self.notes = ConfigNotes()
        for warning in warnings:
            self._notes.add(warning)
        self._spec = spec
        self._function: SharedFunction | None = function

    def create_instance(self, placement: Placement) -> BackendInstance:
        """Creates an instance, on the CPU whatever its kind."""
        assert self._function is not None, "closed models create no instances"
        if placement.kind == "GPU":
            self._notes.add(
                f"model '{self._spec.name}': its instances of KIND_GPU run on the CPU, as backend "
                f"'{self._spec.backend}' has no GPU engine"
            )
        return ArrayInstance(self._spec, self._function)

    def close(self) -> None:
        """Frees the forest."""
        function, self._function = self._function, None
        if function is not None:
            function.release()


def complete_batching(config: dict[str, Any]) -> None:
    """Sets ``max_batch_size`` and a scheduler, unless inputs have a batch dimension of their own."""
    size = int(config.get("max_batch_size") or 0)
    inputs = config.get("input") or ()
    if size == 0 and all(len(tensor.get("dims") or ()) <= 1 for tensor in inputs):
        config["max_batch_size"] = size = MAX_BATCH_SIZE
        log.info("model '%s' supports batching: max_batch_size set to %d", config.get("name", ""), size)
    if size > 1 and not any(key in config for key in _SCHEDULERS):
        config["dynamic_batching"] = {}


def complete_tensors(
    config: dict[str, Any], key: str, tensors: Iterable[ModelTensor], by_default: Iterable[str]
) -> None:
    """Fills in inputs or outputs: those named by default if there are none, else what is left out of each."""
    known = {tensor.name: tensor for tensor in tensors}
    entries = config.setdefault(key, [])
    if not entries:
        entries += [{"name": name} for name in by_default]
    skip = 1 if int(config.get("max_batch_size") or 0) > 0 else 0
    for entry in entries:
        tensor = known.get(entry.get("name", ""))
        if tensor is None:
            continue  # validation says which names there are
        if entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID":
            datatype = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
            entry["data_type"] = f"TYPE_{datatype}"
        if not entry.get("dims") and tensor.dims is not None:
            entry["dims"] = list(tensor.dims[skip:])


def check_rows(name: str, rows: Array, features: int) -> None:
    """Checks the shape of an input, of which a config may leave dims open."""
    if rows.ndim != 2 or rows.shape[1] != features:
        raise InvalidArgumentError(
            f"input '{name}' has shape {list(rows.shape)}, and the model needs rows of {features} features"
        )
