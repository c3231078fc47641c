"""Values of inputs: made up, or read from files in the form of Triton's load generator.

A JSON file has ``{"data": [{input: value, ...}, ...]}``; each entry is one request of one row. A value is a
flat list in row-major order, ``{"b64": text}`` with the bytes of the tensor, or ``{"content": either,
"shape": [...]}``. Entries that are lists are sequences: their entries are sent one after the other. A file
without lists is one sequence. A directory has a file for each input, named as it, with the bytes of one row;
texts are its lines. Several files and directories are joined.

``"validation_data"`` beside ``"data"`` has the outputs of each entry in the same form; so have further files
of a directory.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conch_tools.perf.load.ready_requests import InputTensor, array_data, dtype_of, texts_data

_TEXT = b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789"
_SCHEDULING = ("timestamp", "delay", "session_id")


class DataError(Exception):
    """The data does not fit the model."""


@dataclass(frozen=True, slots=True)
class InputRule:
    """An input as the model's config has it.

    Attributes:
        name: Its name.
        datatype: Triton's, as ``FP32``.
        dims: Without the batch dimension; -1 for any.
        optional: True if requests may lack it.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


def rules_of(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> list[InputRule]:
    """The inputs of a model, with the shapes that the user has given.

    Raises:
        DataError: A shape is missing, or is none of the input's.
    """
    rules = []
    for each in config.get("input", ()):
        name = each["name"]
        dims = tuple(int(dim) for dim in each.get("dims", ()))
        given = shapes.get(name)
        if given is not None:
            fits = len(given) == len(dims) and all(
                a in (b, -1) or b == -1 for a, b in zip(given, dims, strict=True)
            )
            if not fits:
                raise DataError(f"--shape {name}: the input has dims {list(dims)}, not {list(given)}")
            dims = tuple(given)
        datatype = each["data_type"].removeprefix("TYPE_")
        rules.append(
            InputRule(name, "BYTES" if datatype == "STRING" else datatype, dims, bool(each.get("optional")))
        )
    unknown = set(shapes) - {rule.name for rule in rules}
    if unknown:
        names = ", ".join(rule.name for rule in rules)
        raise DataError(f"--shape {min(unknown)}: the model has inputs {names}")
    return rules


def output_rules(config: Mapping[str, Any]) -> list[InputRule]:
    """The outputs of a model; data may be without any of them, and has their elements only."""
    outputs = [{**each, "optional": True, "dims": [-1]} for each in config.get("output", ())]
    return rules_of({"input": outputs}, {})


def made_up(
    rules: Sequence[InputRule], batch: int, batched: bool, count: int, kind: str, seed: int, text_length: int
) -> list[list[InputTensor]]:
    """Tensors of requests with random values, or with zeros.

    Raises:
        DataError: A dimension is free.
    """
    chance = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tensors = []
        for rule in rules:
            if rule.optional:
                continue
            if -1 in rule.dims:
                sizes = ",".join("1" if dim == -1 else str(dim) for dim in rule.dims)
                raise DataError(
                    f"input '{rule.name}' has dims {list(rule.dims)}: name its shape, such as "
                    f"--shape {rule.name}:{sizes}"
                )
            shape = (batch, *rule.dims) if batched else rule.dims
            data = _made_up(rule.datatype, math.prod(shape), kind, chance, text_length)
            tensors.append(InputTensor(rule.name, rule.datatype, shape, data))
        found.append(tensors)
    return found


def _made_up(datatype: str, count: int, kind: str, chance: np.random.Generator, text_length: int) -> bytes:
    if datatype == "BYTES":
        letters = np.frombuffer(_TEXT, np.uint8)
        return texts_data(
            [
                b"" if kind == "zero" else letters[chance.integers(0, len(letters), text_length)].tobytes()
                for _ in range(count)
            ]
        )
    if datatype == "BF16":
        return array_data(np.zeros(count) if kind == "zero" else chance.random(count), datatype)
    dtype = dtype_of(datatype)
    if kind == "zero":
        return bytes(count * dtype.itemsize)
    if dtype.kind == "f":
        return chance.random(count).astype(dtype).tobytes()
    if dtype.kind == "b":
        return chance.integers(0, 2, count).astype(dtype).tobytes()
    info = np.iinfo(dtype)
    return chance.integers(info.min, info.max, count, dtype, endpoint=True).tobytes()


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a file.

    Attributes:
        expected: Outputs that its response must have, by name; None if any will do.
    """

    tensors: Sequence[InputTensor]
    expected: Mapping[str, bytes] | None = None


def read_files(
    paths: Sequence[Path],
    inputs: Sequence[InputRule],
    outputs: Sequence[InputRule],
    batch: int,
    batched: bool,
    skips_unknown: bool = False,
) -> list[list[Row]]:
    """Requests of JSON files and directories, as sequences of requests.

    Raises:
        DataError: A file can't be read, or does not fit.
    """
    sequences = []
    for path in paths:
        if path.is_dir():
            sequences.append([_read_directory(path, inputs, outputs, batch, batched)])
            continue
        entries, found = _read_json(path)
        if skips_unknown:
            entries = _without_unknown(entries, {rule.name for rule in inputs})
        data = _read_lists(f"{path}: data", entries, inputs, batch, batched)
        if "validation_data" not in found:
            sequences += [[Row(tensors) for tensors in steps] for steps in data]
            continue
        where = f"{path}: validation_data"
        validation = found["validation_data"]
        if not isinstance(validation, list) or not validation:
            raise DataError(f"{where} is no list with entries")
        expected = _read_lists(where, validation, outputs, batch, batched)
        if [len(steps) for steps in expected] != [len(steps) for steps in data]:
            raise DataError(f"{where} has no entry for each of 'data'")
        sequences += [
            [Row(tensors, _by_name(wanted)) for tensors, wanted in zip(*steps, strict=True)]
            for steps in zip(data, expected, strict=True)
        ]
    return sequences


def read_payloads(paths: Sequence[Path]) -> list[bytes]:
    """The bodies of JSON files with entries such as ``{"payload": [{...}]}``.

    Raises:
        DataError: A file can't be read, or has other entries.
    """
    found = []
    for path in paths:
        for number, entry in enumerate(_read_json(path)[0]):
            where = f"{path}: data[{number}]"
            payloads = entry.get("payload") if isinstance(entry, dict) else None
            if not isinstance(payloads, list) or len(payloads) != 1 or not isinstance(payloads[0], dict):
                raise DataError(f"{where} has no 'payload' with a list of one object, the body of a request")
            others = [name for name in entry if name != "payload"]
            if others:
                raise _unfollowed(where, others[0])
            found.append(json.dumps(payloads[0], separators=(",", ":"), ensure_ascii=False).encode())
    return found


def _read_json(path: Path) -> tuple[list[Any], Mapping[str, Any]]:
    """The entries of a file, and all of it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from None
    entries = found.get("data") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path}: there is no list 'data' with entries")
    return entries, found


def _without_unknown(entry: Any, known: Collection[str]) -> Any:
    """Entries without members that are neither inputs nor times."""
    if isinstance(entry, list):
        return [_without_unknown(each, known) for each in entry]
    if not isinstance(entry, dict):
        return entry
    return {name: value for name, value in entry.items() if name in known or name in _SCHEDULING}


def _unfollowed(where: str, name: str) -> DataError:
    if name not in _SCHEDULING:
        return DataError(f"{where} has '{name}': an entry has 'payload' only")
    return DataError(
        f"{where} has '{name}', which conch perf does not follow: remove it, and give times by "
        "--distribution trace:FILE"
    )


def _by_name(tensors: Sequence[InputTensor]) -> dict[str, bytes]:
    return {tensor.name: tensor.data for tensor in tensors}


def _read_lists(
    where: str, entries: Sequence[Any], rules: Sequence[InputRule], batch: int, batched: bool
) -> list[list[list[InputTensor]]]:
    """The entries of each inner list; of the whole list, if it has none."""
    if not isinstance(entries[0], list):
        return [_read_entries(where, entries, rules, batch, batched)]
    sequences = []
    for number, steps in enumerate(entries):
        if not isinstance(steps, list) or not steps:
            raise DataError(f"{where}[{number}] is no list with entries, unlike {where}[0]")
        sequences.append(_read_entries(f"{where}[{number}]", steps, rules, batch, batched))
    return sequences


def _read_entries(
    where: str, entries: Sequence[Any], rules: Sequence[InputRule], batch: int, batched: bool
) -> list[list[InputTensor]]:
    return [_read_entry(f"{where}[{n}]", entry, rules, batch, batched) for n, entry in enumerate(entries)]


def _read_directory(
    path: Path, inputs: Sequence[InputRule], outputs: Sequence[InputRule], batch: int, batched: bool
) -> Row:
    names = {rule.name for rule in (*inputs, *outputs)}
    for file in sorted(path.iterdir()):
        if file.name not in names:
            raise DataError(f"{file} is none of the model's tensors {', '.join(sorted(names))}: remove it")
    missing = [rule for rule in inputs if not rule.optional and not (path / rule.name).exists()]
    if missing:
        raise DataError(f"{path} lacks a file '{missing[0].name}' with that input")
    tensors, expected = (
        [_read_raw(path / rule.name, rule, batch, batched) for rule in rules if (path / rule.name).exists()]
        for rules in (inputs, outputs)
    )
    return Row(tensors, _by_name(expected) or None)


def _read_raw(path: Path, rule: InputRule, batch: int, batched: bool) -> InputTensor:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if rule.datatype == "BYTES":
        texts = data.removesuffix(b"\n").split(b"\n")
        data, count = texts_data(texts), len(texts)
    else:
        count = _count(str(path), data, rule.datatype)
    return _tensor(rule, data, _sized(str(path), rule.dims, count), batch, batched)


def _tensor(rule: InputRule, row: bytes, dims: tuple[int, ...], batch: int, batched: bool) -> InputTensor:
    shape = (batch, *dims) if batched else dims
    return InputTensor(rule.name, rule.datatype, shape, row * batch if batched else row)


def _count(where: str, data: bytes, datatype: str) -> int:
    width = 2 if datatype == "BF16" else dtype_of(datatype).itemsize
    if len(data) % width:
        raise DataError(f"{where} has {len(data)} bytes, which is no whole number of {datatype}")
    return len(data) // width


def _read_entry(
    where: str, entry: Any, rules: Sequence[InputRule], batch: int, batched: bool
) -> list[InputTensor]:
    if not isinstance(entry, dict):
        raise DataError(f"{where} is no object with inputs")
    known = {rule.name for rule in rules}
    unknown = [name for name in entry if name not in known]
    if unknown and unknown[0] in _SCHEDULING:
        raise _unfollowed(where, unknown[0])
    if unknown:
        raise DataError(f"{where} has '{unknown[0]}', which is none of {', '.join(sorted(known))}")
    tensors = []
    for rule in rules:
        if rule.name not in entry:
            if not rule.optional:
                raise DataError(f"{where} lacks '{rule.name}'")
            continue
        row, dims = _read_value(f"{where}.{rule.name}", entry[rule.name], rule)
        tensors.append(_tensor(rule, row, dims, batch, batched))
    return tensors


def _read_value(where: str, value: Any, rule: InputRule) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of a value, and its dims."""
    dims = rule.dims
    if isinstance(value, dict) and "content" in value:
        given = value.get("shape")
        if given is not None:
            dims = tuple(int(dim) for dim in given)
        value = value["content"]
    if isinstance(value, dict):
        try:
            data = base64.b64decode(value["b64"], validate=True)
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{where} is neither a list nor has it 'b64' with base64") from None
        if rule.datatype == "BYTES":
            return data, _sized(where, dims, None)
        return data, _sized(where, dims, _count(where, data, rule.datatype))
    values = list(flat(value if isinstance(value, list) else [value]))
    dims = _sized(where, dims, len(values))
    if rule.datatype == "BYTES":
        return texts_data([str(each).encode() for each in values]), dims
    try:
        return array_data(values, rule.datatype), dims
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: {error}") from None


def flat(values: Sequence[Any]) -> Iterator[Any]:
    """The innermost values of lists of lists."""
    for value in values:
        if isinstance(value, list):
            yield from flat(value)
        else:
            yield value


def _sized(where: str, dims: tuple[int, ...], count: int | None) -> tuple[int, ...]:
    """Dims with a free one filled in, which must have so many elements."""
    if count is None:
        if -1 in dims:
            raise DataError(f"{where} needs 'shape': dims {list(dims)} have a free one")
        return dims
    if dims.count(-1) == 1:
        rest = math.prod(dim for dim in dims if dim != -1)
        if rest and not count % rest:
            dims = tuple(count // rest if dim == -1 else dim for dim in dims)
    if -1 in dims or math.prod(dims) != count:
        raise DataError(f"{where} has {count} elements, which is no shape of dims {list(dims)}")
    return dims
