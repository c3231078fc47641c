"""Reads configs: parses ``config.pbtxt``, fills in Triton's defaults, tells the source of each value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.named_files import read_error
from conch_control.config.problems import with_suggestion
from conch_control.config.schema import leaves
from conch_control.config.sequences import normalize_sequences
from conch_control.control_options import MOST_CONFIG_BYTES

_POSITION = re.compile(r"^\d+:\d+ : ")


def parse_config(text: str, source: str) -> ModelConfig:
    """Parses a config in the text format.

    Raises:
        InvalidArgumentError: It is malformed; the text starts with ``source:line:column``.
    """
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        where = f"{source}:{error.GetLine() or 1}:{error.GetColumn() or 1}"
        message = with_suggestion(_POSITION.sub("", str(error)))
        raise InvalidArgumentError(f"{where}: {message}") from error
    except ValueError as error:  # a string is not UTF-8
        raise InvalidArgumentError(f"{source}: {error}") from error
    return config


def check_config_size(size: int, most: int, source: str) -> None:
    """Raises InvalidArgumentError: the config is too large, as its parsing would hold up all requests."""
    if size > most:
        raise InvalidArgumentError(
            f"{source}: a model's config of {size} bytes is too large: --max-model-config-size allows {most}"
        )


def decode_config(content: bytes, source: str, most: int = MOST_CONFIG_BYTES) -> ModelConfig:
    """Parses the content of a config file. Raises InvalidArgumentError: it is malformed or too large."""
    check_config_size(len(content), most, source)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{source}: not UTF-8 text: {error}") from error
    return parse_config(text, source)


def read_config(path: Path, most: int = MOST_CONFIG_BYTES) -> ModelConfig:
    """Reads a config file.

    Raises:
        InternalError: The file can't be read.
        InvalidArgumentError: It is malformed or too large.
    """
    try:
        check_config_size(path.stat().st_size, most, str(path))
        content = path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error
    return decode_config(content, str(path), most)


def normalize(config: ModelConfig) -> None:
    """Fills in all defaults but those of instance groups; idempotent."""
    if config.version_policy.WhichOneof("policy_choice") in (None, "latest"):
        latest = config.version_policy.latest
        latest.num_versions = latest.num_versions or 1
    if config.HasField("dynamic_batching"):
        preferred = config.dynamic_batching.preferred_batch_size
        if not preferred and config.max_batch_size > 0:
            preferred.append(config.max_batch_size)
    normalize_sequences(config)
    if not config.HasField("ensemble_scheduling"):
        for memory in ("input_pinned_memory", "output_pinned_memory"):
            if not config.optimization.HasField(memory):
                getattr(config.optimization, memory).enable = True


CONFIG_FILE = "config.pbtxt"
"""From the model's config file."""

OVERRIDE = "override"
"""From a load request."""

MODEL = "model"
"""Completed from the model's files, mostly by the backend."""

DEFAULT = "default"
"""A default."""


def config_origins(
    written: ModelConfig, completed: ModelConfig, normalised: ModelConfig, source: str = CONFIG_FILE
) -> Mapping[str, str]:
    """Source of each value of a config, by path in schema order.

    A repeated field of plain values has one path, such as ``input[0].dims``; so has an empty message, such
    as ``dynamic_batching``.

    Args:
        written: Config as written.
        completed: Config as the backend completed it; may have defaults.
        normalised: Config in force.
        source: Source of written values: `CONFIG_FILE` or `OVERRIDE`.
    """
    defaults = ModelConfig()
    defaults.CopyFrom(written)
    defaults.name = normalised.name  # defaults to the directory's name
    normalize(defaults)
    known = [
        ({path: value for path, _, value in leaves(config)}, origin)
        for config, origin in ((written, source), (defaults, DEFAULT), (completed, MODEL))
    ]
    return {
        path: next((origin for values, origin in known if path in values and values[path] == value), DEFAULT)
        for path, _, value in leaves(normalised)
    }
