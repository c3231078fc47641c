"""Notes what is wrong with one model, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from conch_control.check.findings import Checkup, Finding, Severity
from conch_control.check.reading import Reading, shortened
from conch_control.config.fieldpaths import value_at
from conch_control.config.problems import Problem


class Notes:
    """The findings of one model.

    Args:
        checkup: Gets the findings.

    Attributes:
        file: Where problems with the config are: its file, or the model's directory if it has none.
        reading: What was read there; None if nothing was.
        known: Paths and messages of problems that need not be reported again.
    """

    def __init__(self, checkup: Checkup) -> None:
        self.checkup = checkup
        self.file = checkup.location
        self.reading: Reading | None = None
        self.known: set[tuple[str, str]] = set()

    def mistakes(self, reading: Reading) -> None:
        """Notes what is wrong with the text of the config."""
        for mistake in reading.mistakes:
            self._note("error", mistake.problem, mistake.line, mistake.column)

    def sort(self) -> None:
        """Puts the findings in the order of the config, those in other files last."""
        self.checkup.findings.sort(key=lambda found: (found.file != self.file, found.line, found.column))

    def report(self, problems: Iterable[Problem], severity: Severity = "error") -> None:
        """Notes problems with the config, each once, but for those that follow from mistakes in its text."""
        for problem in problems:
            if (problem.path, problem.message) in self.known or self._follows(problem.path):
                continue
            self.known.add((problem.path, problem.message))
            line, column = (0, 0) if self.reading is None else self.reading.place(problem.path)
            found = problem.found or self._found(problem.path)
            self._note(severity, replace(problem, found=found), line, column)

    def add(self, severity: Severity, file: str, line: int, column: int, message: str) -> None:
        """Notes something that is not about a field of the config."""
        finding = Finding(severity, file, line, column, "", message)
        if finding not in self.checkup.findings:
            self.checkup.findings.append(finding)

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
        self.checkup.findings.append(finding)

    def _follows(self, path: str) -> bool:
        left_out = frozenset() if self.reading is None else self.reading.left_out
        return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in left_out)

    def _found(self, path: str) -> str:
        if not path or self.reading is None or self.reading.config is None:
            return "nothing" if path else ""
        value = value_at(self.reading.config, path)
        return "nothing" if value is None else shortened(self.reading.text_of(path) or str(value))
