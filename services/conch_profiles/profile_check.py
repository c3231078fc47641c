"""Checks the profile of a training set in a version's directory, and its parameter, for `conch check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conch.core.file_checks import FileFinding
from conch_profiles.profile_settings import PROFILE_PARAMETER, problem_of
from conch_profiles.training_profile import FILE_NAME, TrainingFileError, read_training


def check_profile(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Iterator[FileFinding]:
    """Reads the file, which a server compares with nothing if it is malformed; a `FileCheck`."""
    stated = config.get("parameters", {}).get(PROFILE_PARAMETER, {}).get("string_value")
    if problem := problem_of(stated):
        yield FileFinding("error", problem, path=f'parameters["{PROFILE_PARAMETER}"].string_value')
    path = version_directory / FILE_NAME
    try:
        read_training(path)
    except TrainingFileError as error:
        yield FileFinding("warning", str(error), path)
