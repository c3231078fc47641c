"""A copy of the repository with the config of a variant, and what the variant changes in the config."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_control.config.parse import parse_config, read_config
from conch_tools.tune.config_text import Changed, change_text
from conch_tools.tune.space import apply_variant, reason_of

CONFIG = "config.pbtxt"


def copy_repository(repository: Path, model: str, copy: Path) -> str:
    """Makes a repository of links, in which the model's config can be replaced; returns the config's text.

    Raises:
        InvalidArgumentError: There is no such model, or its config is malformed.
    """
    source = repository / model
    if not source.is_dir():
        raise InvalidArgumentError(f"'{repository}' has no model '{model}'")
    for entry in repository.iterdir():
        if entry.name != model:
            (copy / entry.name).symlink_to(entry.absolute())
    (copy / model).mkdir()
    for entry in source.iterdir():
        if entry.name != CONFIG:
            (copy / model / entry.name).symlink_to(entry.absolute())
    text = config_text(source)
    (copy / model / CONFIG).write_text(text)
    return text


def config_text(model: Path) -> str:
    """The text of a model's config; empty if it has none. Raises InvalidArgumentError: it is malformed."""
    config = model / CONFIG
    if not config.exists():
        return ""
    read_config(config)
    return config.read_text()


def variant_text(text: str, changes: Mapping[str, Any]) -> Changed:
    """The text of a config with other values than today's."""
    return change_text(text, apply_variant(parse_config(text, CONFIG), changes))


def digest_of(model: Path) -> str:
    """Digest of a model's files: a copy has the same."""
    found = hashlib.sha256()
    for path in sorted(model.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            found.update(f"{path.relative_to(model)} {content}\n".encode())
    return found.hexdigest()


def changed(variant: Mapping[str, Any], today: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a variant that are not today's."""
    return {name: value for name, value in variant.items() if value != today[name]}


def config_diff(text: str, variant: Mapping[str, Any], today: Mapping[str, Any]) -> str:
    """The difference to today's config as a unified diff, after a reason for each field."""
    new = changed(variant, today)
    reasons = [f"# {name}: {today[name]} -> {value} ({reason_of(name)})\n" for name, value in new.items()]
    lines = difflib.unified_diff(
        text.splitlines(keepends=True),
        variant_text(text, new).text.splitlines(keepends=True),
        f"a/{CONFIG}",
        f"b/{CONFIG}",
    )
    return "".join([*reasons, *(line if line.endswith("\n") else f"{line}\n" for line in lines)])
