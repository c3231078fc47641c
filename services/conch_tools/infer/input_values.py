"""Values of inputs: JSON, arrays, texts and images, as tensors that fit the model."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array, Tensor, brain_floats, decode_bytes, float_array
from conch_frames.column import EXACT_WHOLES
from conch_tools.infer.images import IMAGE_SUFFIXES, ImageError, image_array
from conch_tools.infer.signature import ModelSignature, TensorRule

_NPY = b"\x93NUMPY"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_SHOWN = 60
_WHOLES = {**EXACT_WHOLES, "BF16": 1 << 8}


class InputError(Exception):
    """A value does not fit the model, or can't be read."""


def make_tensors(
    signature: ModelSignature,
    values: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> list[Tensor]:
    """Tensors of a request, each checked against its input.

    Args:
        signature: The model's.
        values: By input: JSON, an array, or `bytes` for one element of BYTES.
        shapes: Shapes of inputs whose values have none, or another one.

    Raises:
        InputError: Values are missing, unknown, or do not fit.
    """
    rules = {rule.name: rule for rule in signature.inputs}
    for name in (*values, *(shapes or {})):
        if name not in rules:
            raise InputError(
                f"model '{signature.name}' has no input '{name}'; it has {signature.inputs_text}"
            )
    missing = [rule.name for rule in signature.inputs if not rule.optional and rule.name not in values]
    if missing:
        names = ", ".join(missing)
        raise InputError(f"no value for {names}; model '{signature.name}' has {signature.inputs_text}")
    given = [rule for rule in signature.inputs if rule.name in values]
    tensors = [
        _tensor(signature, rule, values[rule.name], None if shapes is None else shapes.get(rule.name))
        for rule in given
    ]
    if signature.batched:
        _check_rows(given, tensors, values)
    return tensors


def _check_rows(rules: Sequence[TensorRule], tensors: Sequence[Tensor], values: Mapping[str, Any]) -> None:
    """Checks that inputs with one value for each row have as many rows as most of them."""
    rows = {
        rule.name: tensor.shape[0]
        for rule, tensor in zip(rules, tensors, strict=True)
        if len(rule.shape) > 1 and rule.shape[0] == -1 and math.prod(rule.shape[1:]) == 1
    }
    usual = Counter(rows.values()).most_common(1)[0][0] if rows else 0
    for name, count in rows.items():
        if count != usual:
            value = values[name]
            commas = isinstance(value, str) and "," in value
            hint = f": write texts as '{json.dumps(value.split(','), ensure_ascii=False)}'" if commas else ""
            other = next(name for name, count in rows.items() if count == usual)
            raise InputError(f"input '{name}' has {count} rows, and input '{other}' has {usual}{hint}")


def read_value(
    signature: ModelSignature, rule: TensorRule, text: str, scaling: str, stdin: Callable[[], bytes]
) -> Any:
    """The value that a command line gives an input: JSON, a text, or the contents of a file.

    Args:
        signature: The model's.
        rule: The input.
        text: The value; after ``@`` a file, or ``-`` for standard input; ``@@`` for a text with ``@``.
        scaling: Scaling of the pixels of images.
        stdin: Reads standard input.

    Raises:
        InputError: It is nothing of that kind.
    """
    if text.startswith("@") and not text.startswith("@@"):
        where = f"input '{rule.name}': {'standard input' if text == '@-' else text[1:]}"
        try:
            content = stdin() if text == "@-" else Path(text[1:]).read_bytes()
        except OSError as error:
            raise InputError(f"{where} can't be read: {error.strerror or error}") from None
        return _contents(signature, rule, where, Path(text[1:]).suffix.lower(), content, scaling)
    text = text[1:] if text.startswith("@@") else text
    if rule.datatype == "BYTES" and text == "null":
        return _null_text(signature, rule)
    if rule.datatype == "BYTES" and not text.startswith(("[", '"')):
        return text
    try:
        return read_json(text)
    except ValueError:
        if rule.datatype == "BYTES":
            return text
    try:
        return read_json(f"[{text}]" if "," in text else "")
    except ValueError:
        raise InputError(
            f"input '{rule.name}' takes {rule.datatype} as JSON, such as 1 or [1, 2], not {_shown(text)}; "
            f"a file is @FILE"
        ) from None


def _null_text(signature: ModelSignature, rule: TensorRule) -> str:
    """The text that a model of columns gets for a null. Raises InputError: its texts can't be null."""
    columns = signature.columns.rules if signature.stated_columns is not None else {}
    column = columns.get(rule.name)
    if column is None or column.null is None:
        raise InputError(
            f"input '{rule.name}' takes texts (BYTES), and null is none: the text null is '\"null\"'"
        )
    return column.null


def read_json(text: str | bytes) -> Any:
    """Reads JSON. Raises ValueError: it is none, is nested too deep, or has a number beyond a double."""
    try:
        return json.loads(text, parse_float=_double)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _double(text: str) -> float:
    """A number; one that is too large is no infinity, which has a name."""
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text} is beyond a double")
    return found


def _contents(
    signature: ModelSignature, rule: TensorRule, where: str, suffix: str, content: bytes, scaling: str
) -> Any:
    if content.startswith(_NPY):
        try:
            return np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise InputError(f"{where}: {error}") from None
    if rule.datatype == "BYTES" and suffix != ".json":
        return _text(content)
    if suffix in IMAGE_SUFFIXES:
        try:
            return image_array(content, rule, signature.batched, scaling)
        except ImageError as error:
            raise InputError(f"{where}: {error}") from None
    try:
        return read_json(content)
    except ValueError as error:
        raise InputError(
            f"{where} is neither an array of numpy (.npy) nor an image ({', '.join(IMAGE_SUFFIXES)}) "
            f"nor JSON: {error}"
        ) from None


def _text(content: bytes) -> bytes:
    """The contents of a file as an element, without the newline that ends a text."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return content
    return content.removesuffix(b"\n")


def _tensor(signature: ModelSignature, rule: TensorRule, value: Any, given: Sequence[int] | None) -> Tensor:
    if isinstance(value, dict) and "content" in value:
        unknown = sorted(set(value) - {"content", "shape"})
        if unknown:
            raise InputError(f"input '{rule.name}' has '{unknown[0]}'; with 'content' goes 'shape' only")
        given = value.get("shape", given)
        value = value["content"]
    array, flat = _array(rule, value)
    shape = _shape(signature, rule, array.shape, flat, _dims(rule, given))
    array = array.reshape(shape)
    if rule.datatype == "BF16":
        return Tensor(rule.name, "BF16", shape, brain_floats(array))
    return Tensor.from_array(rule.name, array, rule.datatype)


def _dims(rule: TensorRule, given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(type(dim) is int and dim >= 0 for dim in given):
        raise InputError(f"the shape of input '{rule.name}' is a list of sizes, not {_shown(given)}")
    return tuple(given)


def _array(rule: TensorRule, value: Any) -> tuple[Array, bool]:
    """The array of a value, of the input's datatype (float32 for BF16), and whether it has no shape."""
    if rule.datatype not in NUMPY_DTYPES and rule.datatype != "BF16":
        raise InputError(f"input '{rule.name}' has the datatype {rule.datatype}, which is not known")
    if isinstance(value, np.ndarray):
        return _converted(rule, value), False
    if isinstance(value, dict):
        return _decoded(rule, value), True
    if isinstance(value, list):
        objects = np.array(value, object)
    else:
        objects = np.empty((), object)
        objects[()] = value
    elements = objects.ravel().tolist()
    if any(isinstance(each, list) for each in elements):
        raise InputError(f"input '{rule.name}' has lists of different lengths side by side")
    made = np.empty(len(elements), _dtype(rule))
    convert = _CONVERSIONS[_dtype(rule).kind]
    try:
        with np.errstate(over="ignore"):  # `_finite` looks for what became infinite
            made[:] = [convert(rule, each) for each in elements]
    except OverflowError:
        raise InputError(f"input '{rule.name}' has a value out of the range of {rule.datatype}") from None
    return _finite(rule, made, elements).reshape(objects.shape), objects.ndim < 2


def _decoded(rule: TensorRule, value: Mapping[str, Any]) -> Array:
    """The elements of ``{"b64": ...}``: the bytes of a tensor."""
    try:
        data = base64.b64decode(value["b64"], validate=True)
        if rule.datatype == "BYTES":
            return decode_bytes(data)
        if rule.datatype == "BF16":
            return float_array(data, (-1,))
        return np.frombuffer(data, NUMPY_DTYPES[rule.datatype])
    except (KeyError, TypeError, binascii.Error):
        raise InputError(f"input '{rule.name}' is neither a list nor has it 'b64' with base64") from None
    except InvalidArgumentError as error:
        raise InputError(f"input '{rule.name}': {error.message}") from None
    except ValueError:
        raise InputError(
            f"input '{rule.name}': 'b64' has bytes that are no whole number of {rule.datatype}"
        ) from None


def _dtype(rule: TensorRule) -> np.dtype[Any]:
    return np.dtype(np.float32) if rule.datatype == "BF16" else NUMPY_DTYPES[rule.datatype]


def _converted(rule: TensorRule, array: Array) -> Array:
    """An array with the input's datatype, if it holds the values; floats may be rounded."""
    wanted = _dtype(rule)
    if wanted.kind == "O":
        if array.dtype.kind not in "SU":
            raise InputError(f"input '{rule.name}' takes texts (BYTES), not an array of {array.dtype}")
        elements = array.ravel().tolist()
        made = np.empty(len(elements), object)
        made[:] = [_encoded(rule, each) if isinstance(each, str) else each for each in elements]
        return made.reshape(array.shape)
    if array.dtype == wanted:
        return array
    kinds = {"b": "b", "i": "iuf", "u": "iuf", "f": "iuf"}[wanted.kind]
    if array.dtype.kind not in kinds:
        raise InputError(f"input '{rule.name}' takes {rule.datatype}, not an array of {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(wanted)
    kept = np.isfinite(array) == np.isfinite(made) if wanted.kind == "f" else array == made
    if wanted.kind == "f" and array.dtype.kind in "iu":
        most = _WHOLES[rule.datatype]
        kept = (array <= most) & (array >= (-most if array.dtype.kind == "i" else 0))
    if not np.all(kept):
        raise InputError(f"input '{rule.name}' has values that {rule.datatype} can't hold")
    return made


def _finite(rule: TensorRule, made: Array, elements: Sequence[Any]) -> Array:
    if made.dtype.kind == "f" and not np.isfinite(made).all():
        for number, each in zip(made.tolist(), elements, strict=True):
            if not math.isfinite(number) and isinstance(each, (int, float)) and math.isfinite(each):
                raise InputError(f"input '{rule.name}': {each} is out of the range of {rule.datatype}")
    return made


def _bool(rule: TensorRule, value: Any) -> bool:
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise InputError(f"input '{rule.name}' takes true or false (BOOL), not {_shown(value)}")


def _whole(rule: TensorRule, value: Any) -> int:
    if isinstance(value, int) or (type(value) is float and value.is_integer()):
        if type(value) is float and abs(value) >= EXACT_WHOLES["FP64"]:
            raise InputError(
                f"input '{rule.name}': {value} may have been rounded: give it without fraction and exponent"
            )
        number = int(value)
        limits = np.iinfo(NUMPY_DTYPES[rule.datatype])
        if not limits.min <= number <= limits.max:
            raise InputError(f"input '{rule.name}': {value} is out of the range of {rule.datatype}")
        return number
    raise InputError(f"input '{rule.name}' takes whole numbers ({rule.datatype}), not {_shown(value)}")


def _number(rule: TensorRule, value: Any) -> float:
    most = _WHOLES[rule.datatype]
    if type(value) is int and abs(value) > most:
        raise InputError(f"input '{rule.name}': {rule.datatype} has whole numbers up to {most}, not {value}")
    if type(value) in (int, float, bool):
        return float(value)
    if value is None:
        return math.nan
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise InputError(f"input '{rule.name}' takes numbers ({rule.datatype}), not {_shown(value)}")


def _bytes(rule: TensorRule, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _encoded(rule, value)
    if isinstance(value, dict) and set(value) == {"b64"}:  # as answers have bytes that are no text
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (TypeError, ValueError):
            pass
    raise InputError(f"input '{rule.name}' takes texts (BYTES), not {_shown(value)}")


def _encoded(rule: TensorRule, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"input '{rule.name}' has a text that is not UTF-8: give bytes as @FILE or {{\"b64\": ...}}"
        ) from None


_CONVERSIONS: Mapping[str, Callable[[TensorRule, Any], Any]] = {
    "b": _bool,
    "i": _whole,
    "u": _whole,
    "f": _number,
    "O": _bytes,
}


def _shape(
    signature: ModelSignature,
    rule: TensorRule,
    shape: tuple[int, ...],
    flat: bool,
    given: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """The shape to send: with a batch dimension, if the value has none."""
    count = math.prod(shape)
    if given is not None:
        if math.prod(given) != count:
            raise InputError(f"input '{rule.name}' has {count} elements, which do not fill {list(given)}")
        shape, flat = given, False
    row = rule.shape[1:] if signature.batched else rule.shape
    if _fits(shape, rule.shape):
        found = shape
    elif signature.batched and _fits(shape, row):
        found = (1, *shape)
    elif signature.batched and len(shape) == 1 and math.prod(row) == 1:
        found = (count, *row)  # a value for each row
    elif flat and row.count(-1) <= 1 and (filled := _filled(row, count)) is not None:
        found = (1, *filled) if signature.batched else filled
    else:
        batch = ", the first for the batch, which may be left out" if signature.batched else ""
        raise InputError(
            f"input '{rule.name}' takes {rule.datatype} of shape {list(rule.shape)}{batch}; "
            f"the value has shape {list(shape)}"
        )
    if signature.most_rows and found[0] > signature.most_rows:
        raise InputError(
            f"input '{rule.name}' has {found[0]} rows, and the model takes {signature.most_rows} at most"
        )
    return found


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(dim in (size, -1) for size, dim in zip(shape, dims, strict=True))


def _filled(dims: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Dims of so many elements; None if there are none."""
    rest = math.prod(dim for dim in dims if dim != -1)
    if -1 not in dims:
        return dims if rest == count else None
    if not rest or count % rest:
        return None
    return tuple(count // rest if dim == -1 else dim for dim in dims)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"'{text}'" if len(text) <= _MOST_SHOWN else f"'{text[:_MOST_SHOWN]}...'"
