"""Checks of models' files by add-ons: what `conch check` finds beside the problems of a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from conch.core.add_ons import load_add_ons

GROUP = "conch.checks"
"""Entry-point group of functions that are a `FileCheck`."""

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class FileFinding:
    """A finding about a file, or about the field of the config at `path`."""

    severity: Severity
    message: str
    file: Path | None = None
    path: str = ""


class FileCheck(Protocol):
    """Reads files of a model version, without running code of them; `OSError` is the only error expected."""

    def __call__(
        self, config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
    ) -> Iterable[FileFinding]:
        """Checks a version.

        Args:
            config: The config in JSON form, not completed.
            version_directory: The version's directory, inside the model's.
            backend_directory: The server's directory of backends; None without one.
        """


def load_file_checks() -> tuple[FileCheck, ...]:
    """The checks of all add-ons."""
    return tuple(load_add_ons(GROUP).values())
