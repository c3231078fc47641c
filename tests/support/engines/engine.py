"""`Engine`: how to make models for an engine, and how to call it without conch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conch.core.tensor import Array
from conch_control.config.json_format import to_json
from conch_control.config.parse import parse_config

WIDTH = 4
"""Features of a row of the models' input."""


class Engine(ABC):
    """One engine, or one of its formats.

    The model that `write` makes has one FP32 input of rows of `WIDTH`; `level` changes its outputs.

    Attributes:
        name: Name of the test's parameter.
        backend: The config's backend.
        packages: Packages that it needs.
        file: Name of the model's file or folder.
        input: Name of the model's input.
        outputs: Names and dims of its FP32 outputs.
        platform: The config's platform.
        datatypes: Those that `write_identity` knows.
        identity_names: Input and output of the identity model.
        allocates: True if it knows `write_allocating`.
        scalars: Datatypes that `write_scalar` knows.
        completes: True if the backend takes inputs and outputs from the file.
        parameters: The config's parameters.
        tolerance: Largest relative difference between a batch and its rows alone.
        slow: True if making a model takes many seconds.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    file: ClassVar[str]
    input: ClassVar[str] = "x"
    outputs: ClassVar[Mapping[str, tuple[int, ...]]] = {"y": (WIDTH,)}
    platform: ClassVar[str] = ""
    datatypes: ClassVar[Sequence[str]] = ()
    identity_names: ClassVar[tuple[str, str]] = ("x", "y")
    allocates: ClassVar[bool] = False
    scalars: ClassVar[Sequence[str]] = ()
    completes: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, str]] = {}
    tolerance: ClassVar[float] = 1e-6
    slow: ClassVar[bool] = False

    @abstractmethod
    def write(self, version: Path, level: float) -> None:
        """Writes the model's file to a version directory."""

    @abstractmethod
    def opened(self, version: Path) -> Callable[[Array], dict[str, Array]]:
        """The engine itself with the model, without conch: a function from rows to outputs."""

    def direct(self, version: Path, rows: Array) -> dict[str, Array]:
        """The engine's own outputs for rows."""
        return self.opened(version)(rows)

    def write_identity(self, version: Path, datatype: str) -> None:
        """Writes a model whose output ``y`` is its input ``x``, both of dims [-1] after the batch."""
        raise NotImplementedError

    def write_scalar(self, version: Path, datatype: str) -> None:
        """Writes a model whose output is its input, both of rank 0."""
        raise NotImplementedError

    def write_allocating(self, version: Path) -> None:
        """Writes a model that makes ones of the dims in a row, and answers with their sum."""
        raise NotImplementedError

    def config(self, name: str, more: str = "") -> str:
        """A whole config of the model."""
        outputs = "".join(
            f'output {{ name: "{output}" data_type: TYPE_FP32 dims: [ {", ".join(map(str, dims))} ] }}\n'
            for output, dims in self.outputs.items()
        )
        platform = f'platform: "{self.platform}"\n' if self.platform else ""
        for key, value in self.parameters.items():
            more += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        return (
            f'name: "{name}"\nbackend: "{self.backend}"\n{platform}max_batch_size: 8\n'
            f'input {{ name: "{self.input}" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}\n{outputs}{more}'
        )

    def parsed_config(self, name: str) -> dict[str, Any]:
        """The config in JSON form."""
        return to_json(parse_config(self.config(name), name))


def sample_rows(count: int, seed: int = 7) -> Array:
    """Rows of random numbers, the same for a seed."""
    return np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32)
