"""Inputs and outputs of a model, by the server's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch_frames.column_rules import COLUMNS_PARAMETER, ModelColumns, ModelInput, make_columns
from conch_tools.server_api import AskError, ServerApi


@dataclass(frozen=True, slots=True)
class TensorRule:
    """An input or an output.

    Attributes:
        name: Its name.
        datatype: The protocol's name, such as ``FP32``.
        shape: With the batch dimension, if the model has one; -1 for a variable dimension.
        optional: True if requests may lack it.
        layout: ``NCHW`` or ``NHWC``, if the config says so.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    layout: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """A model's inputs and outputs.

    Attributes:
        name: The model's name.
        inputs: Its inputs.
        outputs: Its outputs.
        batched: True if the first dimension of all tensors is the batch's.
        most_rows: Rows of the largest batch; 0 if that is not known or there are none.
        decoupled: True if a request has any number of responses.
        stated_columns: The config's parameter `CONCH_COLUMNS`; None without it.
    """

    name: str
    inputs: Sequence[TensorRule]
    outputs: Sequence[TensorRule]
    batched: bool
    most_rows: int = 0
    decoupled: bool = False
    stated_columns: str | None = None

    @property
    def columns(self) -> ModelColumns:
        """The columns that the inputs are. Raises InvalidArgumentError: the config contradicts itself."""
        inputs = [ModelInput(each.name, each.datatype, each.shape, each.optional) for each in self.inputs]
        return make_columns(self.name, inputs, self.stated_columns, self.most_rows)

    @property
    def inputs_text(self) -> str:
        """The inputs in a sentence."""
        return ", ".join(f"{rule} (optional)" if rule.optional else str(rule) for rule in self.inputs)


def read_signature(api: ServerApi, model: str, version: str) -> ModelSignature:
    """Asks the server for a model's metadata and config. Raises AskError."""
    metadata = api.metadata(model, version)
    try:
        config = api.config(model, version)
    except AskError as error:
        if not error.reached:
            raise
        config = {}  # not part of the open protocol
    return signature_of(metadata, config)


def signature_of(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> ModelSignature:
    """Joins metadata and config; an empty config if the server has none."""
    details = {each["name"]: each for each in config.get("input", ())}
    inputs = [_rule(each, details.get(each["name"], {})) for each in metadata.get("inputs", ())]
    most = int(config.get("max_batch_size", 0))
    batched = most > 0 if config else bool(inputs) and all(rule.shape[:1] == (-1,) for rule in inputs)
    return ModelSignature(
        metadata["name"],
        inputs,
        [_rule(each, {}) for each in metadata.get("outputs", ())],
        batched,
        most,
        bool(config.get("model_transaction_policy", {}).get("decoupled")),
        config.get("parameters", {}).get(COLUMNS_PARAMETER, {}).get("string_value"),
    )


def _rule(tensor: Mapping[str, Any], details: Mapping[str, Any]) -> TensorRule:
    layout = str(details.get("format", "")).removeprefix("FORMAT_")
    return TensorRule(
        tensor["name"],
        tensor["datatype"],
        tuple(int(dim) for dim in tensor.get("shape", ())),
        bool(details.get("optional")),
        layout if layout in ("NCHW", "NHWC") else "",
    )
