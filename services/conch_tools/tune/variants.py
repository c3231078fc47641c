"""A copy of the repository with the config of a variant, and what the variant changes in the config."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.parse import read_config
from conch_tools.tune.space import Field, apply_variant
from conch_tools.whole_files import write_whole

CONFIG = "config.pbtxt"


def copy_repository(repository: Path, model: str, copy: Path) -> ModelConfig:
    """Makes a repository of links, in which the model's config can be replaced; returns the config.

    Raises:
        InvalidArgumentError: There is no such model.
    """
    source = repository / model
    if not source.is_dir():
        raise InvalidArgumentError(f"'{repository}' has no model '{model}'")
    for entry in repository.iterdir():
        if entry.name != model:
            (copy / entry.name).symlink_to(entry.resolve())
    (copy / model).mkdir()
    for entry in source.iterdir():
        if entry.name != CONFIG:
            (copy / model / entry.name).symlink_to(entry.resolve())
    config = read_config(source / CONFIG) if (source / CONFIG).exists() else ModelConfig()
    write_config(copy / model / CONFIG, config)
    return config


def write_config(path: Path, config: ModelConfig) -> None:
    """Writes a config in the text format, whole or not at all."""
    write_whole(path, config_text(config))


def config_text(config: ModelConfig) -> str:
    """A config in the text format."""
    return text_format.MessageToString(config, as_utf8=True)


def digest_of(model: Path) -> str:
    """Changes with the config, and with the size or time of any other file of a model."""
    found = hashlib.sha256()
    for path in sorted(model.rglob("*")):
        if path.name == CONFIG:
            found.update(path.read_bytes())
        elif path.is_file() and "__pycache__" not in path.parts:
            status = path.stat()
            found.update(f"{path.relative_to(model)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def changed(variant: Mapping[str, Any], today: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a variant that are not today's."""
    return {name: value for name, value in variant.items() if value != today[name]}


def config_diff(
    written: ModelConfig, variant: Mapping[str, Any], today: Mapping[str, Any], space: Mapping[str, Field]
) -> str:
    """The difference to today's config as a unified diff, after a reason for each field."""
    new = changed(variant, today)
    reasons = [f"# {name}: {today[name]} -> {value} ({space[name].reason})\n" for name, value in new.items()]
    lines = difflib.unified_diff(
        config_text(written).splitlines(keepends=True),
        config_text(apply_variant(written, new)).splitlines(keepends=True),
        f"a/{CONFIG}",
        f"b/{CONFIG}",
    )
    return "".join([*reasons, *lines])
