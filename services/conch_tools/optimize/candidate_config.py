"""Writes ``config.pbtxt`` of a converted model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conch_tools.optimize.model_kinds import Kind
from conch_tools.optimize.model_signature import ModelSignature, TensorInfo
from conch_tools.optimize.sample_data import tensor_data

Array = npt.NDArray[Any]
_WARMUP_FOLDER = "warmup"


def config_text(
    kind: Kind,
    signature: ModelSignature,
    batch: int,
    parameters: Mapping[str, str],
    *,
    name: str = "",
    warmup: Mapping[str, Array] | None = None,
    labels: str = "",
) -> str:
    """A config that says all that the backend can't know; `warmup` holds one sample."""
    lines = [f"name: {json.dumps(name)}"] if name else []
    lines.append(f"backend: {json.dumps(kind.backend)}")
    if kind.platform:
        lines.append(f"platform: {json.dumps(kind.platform)}")
    lines.append(f"default_model_filename: {json.dumps(kind.file)}")
    lines.append(f"max_batch_size: {batch}")
    labelled = _labelled(signature) if labels else ""
    for word, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        for tensor in tensors:
            more = (
                f" label_filename: {json.dumps(labels)}"
                if word == "output" and tensor.name == labelled
                else ""
            )
            lines.append(f"{word} {{ {_tensor(tensor)}{more} }}")
    if batch:
        lines.append("dynamic_batching { }")
    for key, value in {**kind.parameters, **parameters}.items():
        lines.append(f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}")
    if warmup:
        for title, size in (("one", 1), ("full", batch)) if batch else (("one", 1),):
            lines.append(f'model_warmup {{ name: "{title}" batch_size: {size}')
            for number, tensor in enumerate(signature.inputs):
                lines.append(f"  {_warmup_input(number, tensor, warmup)}")
            lines.append("}")
    return "\n".join(lines) + "\n"


def write_warmup(folder: Path, signature: ModelSignature, sample: Mapping[str, Array]) -> None:
    """Writes the data of a sample to the folder of a model."""
    (folder / _WARMUP_FOLDER).mkdir(exist_ok=True)
    for number, tensor in enumerate(signature.inputs):
        (folder / _WARMUP_FOLDER / _file(number)).write_bytes(tensor_data(sample[tensor.name]))


def _tensor(tensor: TensorInfo) -> str:
    dims = f"dims: {list(tensor.dims)}"
    if tensor.reshape is not None:
        dims += f" reshape {{ shape: {list(tensor.reshape)} }}"
    return f"name: {json.dumps(tensor.name)} data_type: {_data_type(tensor.datatype)} {dims}"


def _warmup_input(number: int, tensor: TensorInfo, sample: Mapping[str, Array]) -> str:
    shape = list(np.shape(sample[tensor.name]))
    return (
        f"inputs {{ key: {json.dumps(tensor.name)} value {{ data_type: {_data_type(tensor.datatype)} "
        f"dims: {shape} input_data_file: {json.dumps(_file(number))} }} }}"
    )


def _file(number: int) -> str:
    """The file of an input's warm-up data; names of tensors may be no names of files."""
    return f"input{number}"


def _labelled(signature: ModelSignature) -> str:
    """The output that labels belong to: the first one with several values."""
    found: Sequence[str] = [each.name for each in signature.outputs if each.dims and each.dims[-1] != 1]
    return found[0] if found else signature.outputs[0].name


def _data_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
