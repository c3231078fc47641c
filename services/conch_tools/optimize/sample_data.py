"""Samples for a model's inputs: read from files, or random."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.core.errors import InvalidArgumentError, NotFoundError
from conch.core.tensor import NUMPY_DTYPES
from conch_tools.optimize.model_signature import ModelSignature, TensorInfo

Array = npt.NDArray[Any]
FEWEST = 32
_RANDOM_ROWS = 64
_TEXTS = (b"a", b"some words", b"", b"one more text")


def read_arrays(path: Path) -> dict[str, Array]:
    """Arrays by input of an ``.npz`` file or a folder of ``.npy`` files; empty for a JSON file.

    Raises:
        ConchError: There is nothing, or it can't be read.
    """
    if not path.exists():
        raise NotFoundError(f"--data: there is no '{path}'")
    try:
        if path.is_dir():
            found = {each.stem: np.load(each, allow_pickle=False) for each in sorted(path.glob("*.npy"))}
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        elif path.suffix == ".json":
            return {}
        else:
            raise InvalidArgumentError(
                f"--data: '{path}' must be an .npz file, a folder of .npy files, or a .json file"
            )
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--data: '{path}' can't be read: {error}") from error
    if not found:
        raise InvalidArgumentError(f"--data: there is no array in '{path}'")
    return found


def read_json(path: Path, signature: ModelSignature) -> dict[str, Array]:
    """Arrays by input of a file in perf_analyzer's format: ``{"data": [{"IN": [...]}, ...]}``.

    Raises:
        ConchError: It is of another form.
    """
    try:
        entries = json.loads(path.read_text())["data"]
        return {
            tensor.name: np.stack([_value(entry[tensor.name], tensor) for entry in entries])
            for tensor in signature.inputs
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f'--data: \'{path}\' is not of the form {{"data": [{{"INPUT": [numbers]}}, ...]}}: '
            f"{type(error).__name__}: {error}"
        ) from error


def fitted(arrays: Mapping[str, Array], signature: ModelSignature, origin: str) -> dict[str, Array]:
    """The arrays with the datatypes of the inputs, after a check of names, dims and rows.

    Raises:
        InvalidArgumentError: They do not suit the inputs.
    """
    names = [tensor.name for tensor in signature.inputs]
    if missing := [name for name in names if name not in arrays]:
        raise InvalidArgumentError(
            f"{origin} has no array for input '{missing[0]}'; it has {_listed(sorted(arrays))}, and the "
            f"inputs are {_listed(names)}"
        )
    found = {tensor.name: _fitted(arrays[tensor.name], tensor, origin) for tensor in signature.inputs}
    rows = {len(array) for array in found.values()}
    if len(rows) != 1:
        raise InvalidArgumentError(f"{origin}: all inputs need as many samples, not {sorted(rows)}")
    if min(rows) < FEWEST:
        raise InvalidArgumentError(f"{origin} has {min(rows)} samples; at least {FEWEST} are needed")
    return found


def random_samples(
    signature: ModelSignature, shapes: Mapping[str, Sequence[int]], seed: int = 0
) -> dict[str, Array]:
    """Random samples: normal floats, integers of 0 and 1.

    Raises:
        InvalidArgumentError: A dimension is variable, and no shape tells its size.
    """
    random = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for tensor in signature.inputs:
        dims = tuple(shapes.get(tensor.name, tensor.dims))
        if any(dim < 0 for dim in dims):
            raise InvalidArgumentError(
                f"input '{tensor.name}' has variable dims {list(tensor.dims)}; give --data, or "
                f"--shape {tensor.name}:{','.join('N' if dim < 0 else str(dim) for dim in dims)}"
            )
        shape = (_RANDOM_ROWS, *dims)
        if tensor.datatype == "BYTES":
            found[tensor.name] = random.choice(np.array(_TEXTS, "S"), shape)
        elif tensor.datatype.startswith("FP"):
            found[tensor.name] = random.standard_normal(shape).astype(NUMPY_DTYPES[tensor.datatype])
        else:
            found[tensor.name] = random.integers(0, 2, shape).astype(_dtype(tensor))
    return found


def as_datatype(array: Array, datatype: str) -> Array:
    """Samples of an original as a candidate with another datatype takes them."""
    return array.astype("S" if datatype == "BYTES" else NUMPY_DTYPES[datatype], copy=False)


def tensor_data(array: Array) -> bytes:
    """The bytes of a tensor in the protocol: each text follows its length."""
    if array.dtype.kind == "S":
        return b"".join(len(each).to_bytes(4, "little") + each for each in array.ravel().tolist())
    return array.tobytes()


def _fitted(array: Array, tensor: TensorInfo, origin: str) -> Array:
    dims = array.shape[1:]
    if (
        array.ndim == 0
        or len(dims) != len(tensor.dims)
        or any(wanted not in (-1, found) for wanted, found in zip(tensor.dims, dims, strict=True))
    ):
        raise InvalidArgumentError(
            f"{origin}: input '{tensor.name}' has the shape {list(array.shape)}; expected samples of "
            f"{list(tensor.dims)}, one after the other"
        )
    if tensor.datatype == "BYTES":
        return array.astype("S")
    dtype = _dtype(tensor)
    if array.dtype.kind == "f" and dtype.kind != "f":
        raise InvalidArgumentError(
            f"{origin}: input '{tensor.name}' has floats; the model takes {tensor.datatype}"
        )
    return array.astype(dtype)


def _dtype(tensor: TensorInfo) -> np.dtype[Any]:
    dtype = NUMPY_DTYPES.get(tensor.datatype)
    if dtype is None:
        raise InvalidArgumentError(f"input '{tensor.name}' is {tensor.datatype}, which numpy does not have")
    return dtype


def _value(value: Any, tensor: TensorInfo) -> Array:
    shape: Sequence[int] = tensor.dims
    if isinstance(value, dict) and "content" in value:
        value, shape = value["content"], value.get("shape", shape)
    if isinstance(value, dict):
        flat: Array = np.frombuffer(base64.b64decode(value["b64"]), _dtype(tensor))
    elif tensor.datatype == "BYTES":
        flat = np.array([str(each).encode() for each in value])
    else:
        flat = np.array(value, _dtype(tensor))
    return flat.reshape(shape)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
