"""Reads warm-up samples and their files."""

from __future__ import annotations

import logging
import os
from math import prod
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch.core.spec import WarmupInput, WarmupSample
from conch.core.tensor import ELEMENT_SIZES
from conch.protocol.model_config_pb2 import ModelConfig, ModelWarmup
from conch_control.config.named_files import read_error, stays_within
from conch_control.config.problems import Checked, Problem, Problems, attempt, entry_path, result_or_raise
from conch_control.config.schema import WIRE_NAMES

log = logging.getLogger(__name__)

_FOLDER = "warmup"


def read_warmup(config: ModelConfig, directory: Path) -> tuple[WarmupSample, ...]:
    """The samples to run.

    Raises:
        ConchError: A sample is incomplete, or its file is unreadable or outside that folder.
    """
    samples = tuple(sample for _, sample in result_or_raise(checked_warmup(config, directory)))
    for problem in samples_without_size(config):
        log.warning("model '%s': %s", config.name, problem.message)
    return samples


def samples_without_size(config: ModelConfig) -> Problems:
    """Samples whose batch size is left out, which Triton does not run."""
    for number, sample in enumerate(config.model_warmup):
        if not sample.batch_size:
            yield Problem(
                f"model_warmup[{number}].batch_size",
                f"warmup sample '{sample.name}' has no batch_size and is run with 1",
                expected="at least 1",
            )


def checked_warmup(config: ModelConfig, directory: Path) -> Checked[list[tuple[int, WarmupSample]]]:
    """The samples to run with their numbers in the config, and the problems of the others."""
    samples = []
    for number, sample in enumerate(config.model_warmup):
        made = yield from _sample(f"model_warmup[{number}]", sample, directory / _FOLDER)
        if made is not None:
            samples.append((number, made))
    return samples


def _sample(path: str, sample: ModelWarmup, folder: Path) -> Checked[WarmupSample | None]:
    inputs: list[WarmupInput] = []
    # Sorted: maps have no stable order.
    for name in sorted(sample.inputs):
        made = yield from _input(entry_path(f"{path}.inputs", name), sample, name, folder)
        if made is not None:
            inputs.append(made)
    if len(inputs) != len(sample.inputs):
        return None
    return WarmupSample(sample.name, tuple(inputs), max(sample.batch_size, 1), max(sample.count, 1))


def _input(path: str, sample: ModelWarmup, name: str, folder: Path) -> Checked[WarmupInput | None]:
    given = sample.inputs[name]
    prefix = f"warmup sample '{sample.name}':"
    datatype = WIRE_NAMES.get(given.data_type)
    if datatype is None:
        yield Problem(
            f"{path}.data_type",
            f"{prefix} warmup setting expects input '{name}' to have data_type set",
            expected="an element type, as TYPE_FP32",
        )
        return None
    dims = tuple(given.dims)
    variable = next((number for number, dim in enumerate(dims) if dim < 0), None)
    if variable is not None:
        yield Problem(
            f"{path}.dims[{variable}]",
            f"{prefix} warmup setting expects all variable-size dimensions are specified for input '{name}'",
            expected="0 or more",
        )
        return None
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            return WarmupInput(name, datatype, dims, "ZERO")
        case "random_data":
            return WarmupInput(name, datatype, dims, "RANDOM")
        case "input_data_file":
            # Strings have no fixed size: the whole file, each string after its length.
            size = ELEMENT_SIZES.get(datatype)
            expected = None if size is None else prod(dims) * size
            file = given.input_data_file
            data = yield from attempt(
                f"{path}.input_data_file", lambda: _read(file, expected, name, prefix, folder)
            )
            return None if data is None else WarmupInput(name, datatype, dims, "FILE", data)
    yield Problem(
        path,
        f"{prefix} warmup setting expects input '{name}' to have input_data_type set",
        expected="zero_data, random_data or input_data_file",
        found="none of them",
    )
    return None


def _read(file: str, expected: int | None, name: str, prefix: str, folder: Path) -> bytes:
    """Content of a file, or its first `expected` bytes."""
    if not stays_within(folder, file):
        raise InvalidArgumentError(
            f"{prefix} file '{file}' of input '{name}' must stay within the folder '{_FOLDER}' of the model"
        )
    path = folder / file
    try:
        with path.open("rb") as opened:
            # Before reading: a client's dims may ask for any amount of memory.
            size = os.fstat(opened.fileno()).st_size
            if expected is not None and size < expected:
                raise InvalidArgumentError(
                    f"{prefix} warmup setting expects {expected} bytes, but the data provided from {file} "
                    f"only has {size} bytes"
                )
            return opened.read() if expected is None else opened.read(expected)
    except OSError as error:
        raise read_error(path, error, f"{prefix} ") from error
    except ValueError as error:  # no valid path
        raise InvalidArgumentError(f"{prefix} file '{file}' of input '{name}': {error}") from error
