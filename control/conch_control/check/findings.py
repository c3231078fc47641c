"""What a check of repositories has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from conch.core.spec import ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: ``error``: the model can't be loaded. ``warning``: it can, but perhaps not as it is meant.
            ``note``: what was not looked at.
        file: The file, or the directory where the problem is not in one.
        line: Line in the file, counted from 1; 0 for none.
        column: Column in the line, counted from 1; 0 for none.
        path: Path of the field, such as ``input[1].dims[0]``; empty for the whole.
        message: What is wrong.
        expected: What belongs there; empty where the message says all there is.
        found: What is there instead.
        nearest: A valid name close to the one that was found; empty for none.
    """

    severity: Severity
    file: str
    line: int
    column: int
    path: str
    message: str
    expected: str = ""
    found: str = ""
    nearest: str = ""


@dataclass(slots=True)
class Checkup:
    """What was found out about one model.

    Attributes:
        name: The model.
        location: Where it is: a path or a URL.
        findings: What is wrong with it, in the order of its config.
        versions: Versions that would be loaded.
        config: Its effective config, that of the newest version, if there is one.
        origins: Where each value of the config comes from, by path.
        place: Tells line and column of a value that comes from the config file; None where there is no file.
        specs: What the core would be told, by version; only where that is known.
        certain: Whether the specs are what they would be: nothing was left out that could change them.
    """

    name: str
    location: str
    findings: list[Finding] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    config: ModelConfig | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    place: Callable[[str], tuple[int, int]] | None = None
    specs: dict[int, ModelSpec] = field(default_factory=dict)
    certain: bool = True

    @property
    def failed(self) -> bool:
        """Whether it could not be loaded."""
        return self.count("error") > 0

    def count(self, severity: Severity) -> int:
        """How many findings of a severity there are."""
        return sum(finding.severity == severity for finding in self.findings)


@dataclass(slots=True)
class Report:
    """What was found out about repositories.

    Attributes:
        repositories: Their locations.
        models: The models, by name and location.
        unreadable: Repositories that could not be read, with the reason.
    """

    repositories: tuple[str, ...]
    models: list[Checkup] = field(default_factory=list)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        """How many findings of a severity there are."""
        return sum(model.count(severity) for model in self.models)
