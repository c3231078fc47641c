"""Checks the rules of columns in configs, for `conch check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.file_checks import FileFinding
from conch_frames.column_rules import COLUMNS_PARAMETER, columns_of_config


def check_columns(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Iterator[FileFinding]:
    """Compares `CONCH_COLUMNS` with the inputs that a config lists; a `FileCheck`."""
    inputs = config.get("input") or ()
    if COLUMNS_PARAMETER not in config.get("parameters", {}):
        return
    if not inputs or not all("data_type" in each and each.get("dims") for each in inputs):
        return  # completion fills them in
    try:
        columns_of_config(config)
    except InvalidArgumentError as error:
        yield FileFinding("error", error.message, path=f'parameters["{COLUMNS_PARAMETER}"].string_value')
