"""Reads ``config.pbtxt``, with errors that say where and what."""

from __future__ import annotations

import os
import re
from pathlib import Path

from google.protobuf import text_format

from conch.core.errors import InternalError, InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.problems import with_suggestion

_POSITION = re.compile(r"^\d+:\d+ : ")


def parse_config(text: str, source: str) -> ModelConfig:
    """Parses a config in protobuf's text format.

    Args:
        text: The config.
        source: Where it comes from, for errors.

    Raises:
        InvalidArgumentError: It is not a model config; the text starts with ``source:line:column``.
    """
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        where = f"{source}:{error.GetLine() or 1}:{error.GetColumn() or 1}"
        message = with_suggestion(_POSITION.sub("", str(error)))
        raise InvalidArgumentError(f"{where}: {message}") from error
    except ValueError as error:  # a string that is not UTF-8
        raise InvalidArgumentError(f"{source}: {error}") from error
    return config


def decode_config(content: bytes, source: str) -> ModelConfig:
    """Parses the contents of a config file.

    Raises:
        InvalidArgumentError: It is not a model config.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{source}: not UTF-8 text: {error}") from error
    return parse_config(text, source)


def read_config(path: Path) -> ModelConfig:
    """Reads a config file.

    Raises:
        InternalError: The file can't be read.
        InvalidArgumentError: It is not a model config.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InternalError(f"failed to open text file for read {path}: {reason}") from error
    return decode_config(content, str(path))
