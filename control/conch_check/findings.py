"""Findings of a check: their data classes, and their collection for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from conch.core.file_checks import Severity
from conch.core.spec import ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.reading import ParsedConfig, shorten
from conch_control.config.problems import Problem
from conch_control.config.schema import value_at


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        severity: ``error``: the model can't be loaded. ``warning``: it can, but perhaps not as meant.
            ``note``: not checked.
        file: File, or directory if the problem is not in a file.
        path: Field path, such as ``input[1].dims[0]``; empty for the whole.
        expected: The valid value, if the message does not name it.
        nearest: A similar valid name, if any.
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
    """Result of checking one model.

    Attributes:
        findings: Findings in the order of its config.
        versions: Versions that would be loaded.
        config: Effective config of the newest version, if known.
        origins: Source of each config value, by path.
        place: Returns line and column of a value in the config file; None without a file.
        specs: Specs by version, where known.
        certain: True if nothing was skipped that could change the specs.
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
        """True if it could not be loaded."""
        return self.count("error") > 0

    def count(self, severity: Severity) -> int:
        """Number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)


@dataclass(slots=True)
class Report:
    """Result of checking repositories; `unreadable` has the reasons of those that can't be read."""

    repositories: tuple[str, ...]
    models: list[ModelReport] = field(default_factory=list)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        """Number of findings of a severity."""
        return sum(model.count(severity) for model in self.models)


class FindingCollector:
    """Collects the findings of one model and locates them in its config file.

    Attributes:
        file: Config file, or the model's directory if it has none.
        reading: Parsed config text; None without a file.
        known: Paths and messages already reported.
    """

    def __init__(self, model_report: ModelReport) -> None:
        self.model_report = model_report
        self.file = model_report.location
        self.reading: ParsedConfig | None = None
        self.known: set[tuple[str, str]] = set()

    def mistakes(self, reading: ParsedConfig) -> None:
        """Adds the syntax errors of the config."""
        for mistake in reading.mistakes:
            self._add("error", mistake.problem, mistake.line, mistake.column)

    def sort(self) -> None:
        """Sorts by position in the config; other files last."""
        self.model_report.findings.sort(key=lambda found: (found.file != self.file, found.line, found.column))

    def report(self, problems: Iterable[Problem], severity: Severity = "error") -> None:
        """Adds problems of the config once, without consequences of syntax errors."""
        for problem in problems:
            if (problem.path, problem.message) in self.known or self._is_consequence(problem.path):
                continue
            self.known.add((problem.path, problem.message))
            line, column = (0, 0) if self.reading is None else self.reading.place(problem.path)
            found = problem.found or self._found(problem.path)
            self._add(severity, replace(problem, found=found), line, column)

    def add(self, severity: Severity, file: str, line: int, column: int, message: str) -> None:
        """Adds a finding that concerns no config field."""
        finding = Finding(severity, file, line, column, "", message)
        if finding not in self.model_report.findings:
            self.model_report.findings.append(finding)

    def _add(self, severity: Severity, problem: Problem, line: int, column: int) -> None:
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

    def _is_consequence(self, path: str) -> bool:
        left_out = frozenset() if self.reading is None else self.reading.dropped
        return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in left_out)

    def _found(self, path: str) -> str:
        if not path or self.reading is None or self.reading.config is None:
            return "nothing" if path else ""
        value = value_at(self.reading.config, path)
        return "nothing" if value is None else shorten(self.reading.source_text(path) or str(value))
