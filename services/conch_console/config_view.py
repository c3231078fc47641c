"""The config of a model as the console shows it: effective lines with their sources, the file, and findings.

Checks the model as `conch check` does, without running its code. Blocking: it reads the repository. Threads
and locks: any thread; no state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from conch.core.errors import NotFoundError
from conch_check.findings import Finding, ModelReport
from conch_check.model_checks import Rules
from conch_check.report import config_lines, finding_object
from conch_check.repository_checks import UnknownModelError, check_repositories
from conch_console.secrets_masking import masked_config, masked_text
from conch_control.repository.layout import CONFIG_FILE, variant_path
from conch_control.repository.source import ModelSource, Repository

log = logging.getLogger(__name__)


class ConfigView:
    """Shows and checks configs.

    Args:
        repositories: Where the models are.
        rules: Settings of checks.
    """

    def __init__(self, repositories: Iterable[Repository], rules: Rules) -> None:
        self._repositories = repositories
        self._rules = rules

    def show(self, name: str) -> dict[str, Any]:
        """The effective config, the file and the findings. Raises NotFoundError: no repository has it."""
        report = self._report(name)
        config = report.config
        lines: list[tuple[str, str | None]] = []
        if config is not None:
            lines = config_lines(masked_config(config), report.origins, report.place)
        file = next((each.file for each in report.findings if each.line), "")
        return {
            "name": report.name,
            "location": report.location,
            "lines": lines,
            "file": file or f"{report.location}/{CONFIG_FILE}",
            "text": self._text(name),
            "findings": [_shown(finding) for finding in report.findings],
        }

    def findings(self, name: str) -> list[dict[str, Any]]:
        """What is wrong with a model that could not be loaded; empty where that can't be found out."""
        try:
            return [_shown(each) for each in self._report(name).findings if each.severity == "error"]
        except Exception:
            log.debug("'%s' could not be checked", name, exc_info=True)
            return []

    def _report(self, name: str) -> ModelReport:
        try:
            report = check_repositories(self._repositories, self._rules, [name])
        except UnknownModelError as error:
            raise NotFoundError(str(error)) from None
        if not report.models:
            raise NotFoundError(f"no repository that can be read has a model '{name}'")
        return report.models[0]

    def _text(self, name: str) -> str | None:
        """The config file as it is; None without one."""
        for source in self._sources(name):
            variant = self._rules.options.model_config_name
            for path in (*([variant_path(variant)] if variant else []), CONFIG_FILE):
                try:
                    return masked_text(source.read(path).decode(errors="replace"))
                except OSError:
                    continue
        return None

    def _sources(self, name: str) -> Iterable[ModelSource]:
        for repository in self._repositories:
            try:
                source = repository.models().get(name)
            except OSError:
                continue
            if source is not None:
                yield source


def _shown(finding: Finding) -> dict[str, Any]:
    found = finding_object(finding)
    return found | {"found": masked_text(found["found"]), "message": masked_text(found["message"])}
