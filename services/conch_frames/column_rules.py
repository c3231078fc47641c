"""Rules of the columns that a model takes, from its config. Pure.

A column is an input of one value for each row, or one of those that together are the model's only input, a
matrix. The config's parameter ``CONCH_COLUMNS`` names the columns of a matrix in the model's order, and adds
what a datatype can't say: the categories of a column, the unit of its dates, the text of its nulls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.core.tensor import NUMPY_DTYPES

COLUMNS_PARAMETER = "CONCH_COLUMNS"
"""Parameter of a config: a JSON list of names, or of objects with the fields of `_FIELDS`."""

PARAMETERS = (COLUMNS_PARAMETER,)
"""Parameters of configs that this package reads."""

UNITS = ("s", "ms", "us", "ns")
"""Units of dates as numbers since 1970, in UTC."""
ISO = "iso"
"""Unit of dates as texts."""

_FIELDS = ("name", "categories", "codes", "unseen", "unit", "null", "spaces")
_REFUSE, _NULL = "refuse", "null"


@dataclass(frozen=True, slots=True)
class ColumnRule:
    """The values that a column of a model takes.

    Attributes:
        name: The column.
        datatype: Datatype of its input.
        optional: True if a table may leave it out.
        categories: Values that may come, of one type; None for any.
        codes: True if the model takes the number of a category in `categories` instead of its value.
        unseen_is_null: True if other values are nulls; else they are refused.
        unit: Unit of dates: one of `UNITS` for numbers, `ISO` for texts; empty if dates are refused.
        null: Text that stands for a null in a column of texts; None if nulls are refused.
        takes_booleans: True if a column of numbers takes true and false as 1 and 0.
        is_binary: True if texts are base64 of bytes.
        spaces: True if the model's library has written ``_`` for spaces in the name.
    """

    name: str
    datatype: str
    optional: bool = False
    categories: tuple[Any, ...] | None = None
    codes: bool = False
    unseen_is_null: bool = False
    unit: str = ""
    null: str | None = None
    takes_booleans: bool = True
    is_binary: bool = False
    spaces: bool = False


@dataclass(frozen=True, slots=True)
class ModelInput:
    """An input of a model.

    Attributes:
        name: Its name.
        datatype: Protocol name of its datatype.
        dims: Its whole shape, with the batch dimension; -1 for a variable one.
        optional: True if a request may leave it out.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False

    @property
    def is_column(self) -> bool:
        """True if it has one value for each row."""
        return len(self.dims) == 1 or (len(self.dims) == 2 and self.dims[1] == 1)


@dataclass(frozen=True, slots=True)
class ModelColumns:
    """The columns and further inputs of a model.

    Attributes:
        model: The model's name.
        inputs: Its inputs by name.
        rules: Rules of the columns by name, in the model's order; of columns that are inputs, or of those of
            `matrix`. None of a matrix whose columns have no names.
        matrix: The input that all columns are in; None if each is an input.
        max_batch_size: Most rows of a request; 0 for any number.
        by_position: True if columns of a matrix without names may have any.
    """

    model: str
    inputs: Mapping[str, ModelInput]
    rules: Mapping[str, ColumnRule]
    matrix: ModelInput | None = None
    max_batch_size: int = 0
    by_position: bool = False

    def wants(self, name: str) -> bool:
        """True for the names of columns that may become inputs."""
        return not self.rules or name in self.inputs or self._rule_of(name)

    def _rule_of(self, name: str) -> bool:
        if name in self.rules:
            return True
        other = self.rules.get(name.replace(" ", "_"))
        return other is not None and other.spaces

    @property
    def most_rows(self) -> int:
        """Most rows of a request, 0 for any number; 1 for inputs without a dimension for rows."""
        if self.max_batch_size:
            return self.max_batch_size
        return int(any(self.inputs[name].dims[:1] == (1,) for name in self.rules if name in self.inputs))


def columns_of_spec(spec: ModelSpec) -> ModelColumns:
    """The columns of a loaded model. Raises InvalidArgumentError: `CONCH_COLUMNS` contradicts the inputs."""
    inputs = [
        ModelInput(each.name, each.datatype, spec.full_dims(each), each.optional) for each in spec.inputs
    ]
    return make_columns(spec.name, inputs, spec.parameters.get(COLUMNS_PARAMETER), spec.max_batch_size)


def columns_of_config(config: Mapping[str, Any]) -> ModelColumns:
    """The columns of a model by its config in JSON, as servers return it over HTTP and gRPC.

    Raises:
        InvalidArgumentError: `CONCH_COLUMNS` contradicts the inputs.
    """
    most = int(config.get("max_batch_size", 0))
    inputs = []
    for each in config.get("input", ()):
        datatype = str(each["data_type"]).removeprefix("TYPE_")
        dims = tuple(int(dim) for dim in each.get("dims", ()))
        shaped = (-1, *dims) if most and not each.get("is_shape_tensor") else dims
        optional = bool(each.get("optional"))
        inputs.append(
            ModelInput(each["name"], "BYTES" if datatype == "STRING" else datatype, shaped, optional)
        )
    stated = config.get("parameters", {}).get(COLUMNS_PARAMETER, {}).get("string_value")
    return make_columns(config.get("name", ""), inputs, stated, most)


def make_columns(
    model: str, inputs: Sequence[ModelInput], stated: str | None, max_batch_size: int
) -> ModelColumns:
    """The columns of a model with these inputs.

    Args:
        model: Its name, for errors.
        inputs: Its inputs.
        stated: The parameter `CONCH_COLUMNS`, if the config has it.
        max_batch_size: Most rows of a request; 0 for a model without batching.
    """
    by_name = {each.name: each for each in inputs}
    entries = {} if stated is None else _entries(model, stated)
    needed = [each for each in inputs if not each.optional] or list(inputs)
    only = needed[0] if len(needed) == 1 else None
    if entries and only is not None and not entries.keys() <= by_name.keys():
        width = only.dims[-1] if len(only.dims) > 1 else 1
        if len(only.dims) > 2 or (width != -1 and width != len(entries)):
            raise InvalidArgumentError(
                f"model '{model}': parameter '{COLUMNS_PARAMETER}' has {len(entries)} columns, and input "
                f"'{only.name}' has dims {list(only.dims)}: name one for each of its columns"
            )
        rules = {name: _rule(model, name, only, entry) for name, entry in entries.items()}
        return ModelColumns(model, by_name, rules, only, max_batch_size)
    if only is not None and len(only.dims) == 2 and only.dims[1] != 1:
        return ModelColumns(model, by_name, {}, only, max_batch_size)
    for name in entries:
        if name not in by_name or not by_name[name].is_column:
            raise InvalidArgumentError(
                f"model '{model}': parameter '{COLUMNS_PARAMETER}' has a column '{name}', which is no input "
                f"with one value for each row"
            )
    rules = {
        each.name: _rule(model, each.name, each, entries.get(each.name, {}))
        for each in inputs
        if each.is_column
    }
    return ModelColumns(model, by_name, rules, None, max_batch_size)


def _entries(model: str, stated: str) -> dict[str, dict[str, Any]]:
    where = f"model '{model}': parameter '{COLUMNS_PARAMETER}'"
    try:
        found = orjson.loads(stated)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise InvalidArgumentError(f"{where} must be a list of names, or of objects with a name")
    entries: dict[str, dict[str, Any]] = {}
    for each in found:
        entry = {"name": each} if isinstance(each, str) else each
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"{where} has {each!r}, which is no name and no object with a name")
        unknown = sorted(entry.keys() - set(_FIELDS))
        if unknown:
            raise InvalidArgumentError(
                f"{where}: column '{name}' has '{unknown[0]}'; known are {', '.join(_FIELDS)}"
            )
        if name in entries:
            raise InvalidArgumentError(f"{where} has column '{name}' twice")
        entries[name] = entry
    return entries


def _rule(model: str, name: str, of: ModelInput, entry: Mapping[str, Any]) -> ColumnRule:
    """The rule of a column; each field that does not fit the datatype is refused."""
    where = f"model '{model}': parameter '{COLUMNS_PARAMETER}', column '{name}'"
    texts = of.datatype == "BYTES"
    floats = NUMPY_DTYPES.get(of.datatype, NUMPY_DTYPES["BOOL"]).kind == "f"
    categories = entry.get("categories")
    if categories is not None and (not isinstance(categories, list) or not _one_type(categories)):
        raise InvalidArgumentError(f"{where}: 'categories' must be a list of different values of one type")
    codes = entry.get("codes", False)
    if codes not in (True, False) or (codes and (categories is None or texts)):
        raise InvalidArgumentError(
            f"{where}: 'codes' must be true or false; it needs categories, and an input of numbers"
        )
    if categories is not None and isinstance(categories[0], str) and not texts and not codes:
        raise InvalidArgumentError(
            f"{where}: its categories are texts and its input is {of.datatype}: set 'codes' to true if the "
            f"model takes their numbers"
        )
    if categories is not None and not isinstance(categories[0], str) and texts:
        raise InvalidArgumentError(f"{where}: its categories are no texts, and its input is")
    spaces = entry.get("spaces", False)
    if spaces not in (True, False):
        raise InvalidArgumentError(f"{where}: 'spaces' must be true or false")
    unseen = entry.get("unseen", _REFUSE)
    if unseen not in (_REFUSE, _NULL) or (unseen == _NULL and not (floats or "null" in entry)):
        raise InvalidArgumentError(
            f"{where}: 'unseen' must be '{_REFUSE}', or '{_NULL}' where the column takes nulls"
        )
    unit = entry.get("unit", "")
    if unit not in ("", *((ISO,) if texts else UNITS)) or (unit and of.datatype == "BOOL"):
        raise InvalidArgumentError(
            f"{where}: 'unit' of dates must be {ISO if texts else ', '.join(UNITS)}, not {unit!r}"
        )
    null = entry.get("null")
    if null is not None and not (texts and isinstance(null, str)):
        raise InvalidArgumentError(f"{where}: 'null' must be a text, and needs an input of texts")
    return ColumnRule(
        name=name,
        datatype=of.datatype,
        optional=of.optional,
        categories=None if categories is None else tuple(categories),
        codes=bool(codes),
        unseen_is_null=unseen == _NULL,
        unit=unit,
        null=null,
        spaces=bool(spaces),
    )


def _one_type(values: Sequence[Any]) -> bool:
    kinds = {type(each) for each in values}
    return len(kinds) == 1 and kinds <= {str, int, float, bool} and len(set(values)) == len(values)
