"""The config of a model as the console shows it: effective lines with their sources, the file, and findings.

Checks the model as `conch check` does, without running its code. Values whose keys look like those of secrets
are hidden. Blocking: it reads the repository. Threads and locks: any thread; no state.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from conch.core.errors import NotFoundError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.findings import Finding, ModelReport
from conch_check.model_checks import Rules
from conch_check.report import config_lines, finding_object
from conch_check.repository_checks import UnknownModelError, check_repositories
from conch_control.repository.layout import CONFIG_FILE, variant_path
from conch_control.repository.source import ModelSource, Repository

log = logging.getLogger(__name__)

_HIDDEN: Final = "***"
_SECRET = r"(?:token|secret|passw|credential|api[-_]?key|access[-_]?key|private[-_]?key)"
_NAME: Final = re.compile(_SECRET, re.IGNORECASE)
_STRING: Final = r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
_STRINGS: Final = rf"({_STRING}(?:\s*{_STRING})*)"
_VALUE: Final = r"value\s*:?\s*(?:\{\s*string_value\s*)?:\s*"
_KEY: Final = rf"""key\s*:\s*["'][^"'\n]*{_SECRET}"""
# In either order, within one entry of a map.
_KEY_FIRST: Final = re.compile(rf"(\b{_KEY}[^{{}}]*?\b{_VALUE}){_STRINGS}", re.IGNORECASE)
_VALUE_FIRST: Final = re.compile(rf"(\b{_VALUE}){_STRINGS}(?=\s*\}}?[\s,;]*{_KEY})", re.IGNORECASE)


class ConfigView:
    """Shows and checks configs.

    Args:
        repositories: Repositories of the models.
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
        """Errors that `conch check` finds in a model that could not be loaded; empty if the check fails."""
        try:
            return [_shown(each) for each in self._report(name).findings if each.severity == "error"]
        except Exception:  # of a check, which runs after a load has failed for any reason
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


def masked_config(config: ModelConfig) -> ModelConfig:
    """A copy without the values of secret parameters."""
    copy = ModelConfig()
    copy.CopyFrom(config)
    for key in copy.parameters:
        if _NAME.search(key):
            copy.parameters[key].string_value = _HIDDEN
    for parameters in _maps(copy):
        for key in parameters:
            if _NAME.search(key):
                parameters[key] = _HIDDEN
    return copy


def masked_text(text: str) -> str:
    """The text of a config file without the values of secret parameters."""
    return _VALUE_FIRST.sub(_hidden, _KEY_FIRST.sub(_hidden, text))


def _hidden(found: re.Match[str]) -> str:
    return f'{found[1]}"{_HIDDEN}"' + "\n" * found[2].count("\n")  # lines keep their numbers


def _maps(config: ModelConfig) -> Iterator[Any]:
    """The maps of texts in a config whose keys a user chooses."""
    for agent in config.model_repository_agents.agents:
        yield agent.parameters
    accelerators = config.optimization.execution_accelerators
    for each in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        yield each.parameters
