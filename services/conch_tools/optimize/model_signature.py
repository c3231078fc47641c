"""The inputs and outputs of a model that is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or an output.

    Attributes:
        name: Its name.
        datatype: The protocol's name, such as ``FP32``.
        dims: Dimensions of one sample; -1 for a variable one.
        reference: Name of the original model's tensor that it stands for.
        reshape: Dimensions that the backend gives it, if these are others.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    reference: str = ""
    reshape: tuple[int, ...] | None = None

    @property
    def original(self) -> str:
        """The name of the original model's tensor."""
        return self.reference or self.name

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> TensorInfo:
        """Reads the JSON of a step."""
        shape = value.get("reshape")
        return cls(
            value["name"],
            value["datatype"],
            tuple(value["dims"]),
            value.get("reference", ""),
            None if shape is None else tuple(shape),
        )


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """All tensors of a model, and whether their first dimension counts samples."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    batching: bool

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> ModelSignature:
        """Reads the JSON of a step."""
        return cls(_tensors(value["inputs"]), _tensors(value["outputs"]), bool(value["batching"]))

    def with_dims(self) -> ModelSignature:
        """Gives a dimension of 1 to outputs of one value a sample, as configs need dims."""
        outputs = (each if each.dims else replace(each, dims=(1,), reshape=()) for each in self.outputs)
        return replace(self, outputs=tuple(outputs))

    def changed_by(self, facts: Mapping[str, Any]) -> ModelSignature:
        """The signature of a converted model, of which a step tells what differs."""
        inputs = _tensors(facts["inputs"]) if "inputs" in facts else self.inputs
        outputs = _tensors(facts["outputs"]) if "outputs" in facts else self.outputs
        return ModelSignature(inputs, outputs, self.batching)

    def as_json(self) -> dict[str, Any]:
        """As `of` reads it."""
        return asdict(self)


def _tensors(values: Sequence[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo.of(value) for value in values)
