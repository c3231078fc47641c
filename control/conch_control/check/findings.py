"""What a check of repositories has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from conch.core.spec import ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.check.reading import ParsedConfig, shortened
from conch_control.config.problems import Problem
from conch_control.config.schema import value_at

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
class ModelReport:
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
    models: list[ModelReport] = field(default_factory=list)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        """How many findings of a severity there are."""
        return sum(model.count(severity) for model in self.models)


class FindingCollector:
    """The findings of one model.

    Args:
        checkup: Gets the findings.

    Attributes:
        file: Where problems with the config are: its file, or the model's directory if it has none.
        reading: What was read there; None if nothing was.
        known: Paths and messages of problems that need not be reported again.
    """

    def __init__(self, model_report: ModelReport) -> None:
        self.model_report = model_report
        self.file = model_report.location
        self.reading: ParsedConfig | None = None
        self.known: set[tuple[str, str]] = set()

    def mistakes(self, reading: ParsedConfig) -> None:
        """FindingCollector what is wrong with the text of the config."""
        for mistake in reading.mistakes:
            self._note("error", mistake.problem, mistake.line, mistake.column)

    def sort(self) -> None:
        """Puts the findings in the order of the config, those in other files last."""
        self.model_report.findings.sort(key=lambda found: (found.file != self.file, found.line, found.column))

    def report(self, problems: Iterable[Problem], severity: Severity = "error") -> None:
        """FindingCollector problems with the config, each once, but for those that follow from mistakes in its text."""
        for problem in problems:
            if (problem.path, problem.message) in self.known or self._follows(problem.path):
                continue
            self.known.add((problem.path, problem.message))
            line, column = (0, 0) if self.reading is None else self.reading.place(problem.path)
            found = problem.found or self._found(problem.path)
            self._note(severity, replace(problem, found=found), line, column)

    def add(self, severity: Severity, file: str, line: int, column: int, message: str) -> None:
        """FindingCollector something that is not about a field of the config."""
        finding = Finding(severity, file, line, column, "", message)
        if finding not in self.model_report.findings:
            self.model_report.findings.append(finding)

    def _note(self, severity: Severity, problem: Problem, line: int, column: int) -> None:
        finding = Finding(
            severity,
            self.file,
            line,
            column,
            problem.path,
            problem.message,
            problem.expected,
            problem.found,
            problem.nearest,
        )
        self.model_report.findings.append(finding)

    def _follows(self, path: str) -> bool:
        left_out = frozenset() if self.reading is None else self.reading.left_out
        return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in left_out)

    def _found(self, path: str) -> str:
        if not path or self.reading is None or self.reading.config is None:
            return "nothing" if path else ""
        value = value_at(self.reading.config, path)
        return "nothing" if value is None else shortened(self.reading.text_of(path) or str(value))
