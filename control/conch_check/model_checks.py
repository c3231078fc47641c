"""Checks one model: runs the checks of a load, without loading.

Unlike a load, each check continues after its first problem.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from conch.core.backend import Backend, FindBackend
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.execution.warmup import Warmup
from conch.core.file_checks import FileCheck
from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.findings import FindingCollector, ModelReport
from conch_check.reading import read_text
from conch_check.static_checks import (
    PythonFile,
    agent_notes,
    agent_problems,
    ineffective_settings,
    read_python,
)
from conch_control.config.instance_groups import resolving_groups
from conch_control.config.json_format import to_json
from conch_control.config.model_spec import assemble_spec, read_extras
from conch_control.config.parse import check_config_size, config_origins, normalize
from conch_control.config.platforms import (
    checked_model_file,
    complete,
    filling_backend,
    is_ensemble,
    runtime_problems,
)
from conch_control.config.powers import beyond_data, is_code, runs_to_read
from conch_control.config.problems import Problem, Problems, attempt, collect, nearest
from conch_control.config.ragged import ragged_problems
from conch_control.config.schema import is_map, leaves, value_at
from conch_control.config.validate import config_problems, support_problems, tensor_problems
from conch_control.config.warmup import checked_warmup
from conch_control.control_options import ControlOptions
from conch_control.native_agents import NativeAgents
from conch_control.repository.layout import (
    CONFIG_FILE,
    ROLLOUT_FILE,
    select_versions,
    split_versions,
    variant_path,
)
from conch_control.repository.source import ModelSource
from conch_rollout.rollout_file import (
    Declaration,
    Rollout,
    declaration_warnings,
    parse_toml,
)
from conch_rollout.rollout_file import (
    read_text as read_utf8,
)

log = logging.getLogger(__name__)

_PYTHON = "python"
_COMPLETED = ("input", "output")


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of a check.

    Attributes:
        get_backend: Finds a backend by name; raises InvalidArgumentError if there is none.
        backends: Names of all backends, for suggestions.
        run_code: Allow models to run their own code for completion.
        data_only: Report what makes more than data of a model.
        file_checks: The checks of add-ons.
    """

    options: ControlOptions
    get_backend: FindBackend
    backends: Sequence[str] = ()
    run_code: bool = False
    data_only: bool = False
    file_checks: Sequence[FileCheck] = ()


class ModelCheck:
    """The check of one model.

    Attributes:
        model_report: The findings.
        config: Config with defaults, not completed; None if unreadable.
        declaration: Its labels and rollout; None without a valid file.
    """

    def __init__(self, source: ModelSource, rules: Rules) -> None:
        self.model_report = ModelReport(source.name, source.location)
        self._collector = FindingCollector(self.model_report)
        self.report = self._collector.report
        self.sort = self._collector.sort
        self.config: ModelConfig | None = None
        self.declaration: Declaration | None = None
        self._versions: Sequence[int] = ()  # with a directory
        self._directory = Path()  # local directory
        self._backend_found: Backend | None = None
        self._source = source
        self._rules = rules

    def run(self) -> None:
        """Checks everything that needs no other model."""
        try:
            self._run()
        except Exception as error:  # boundary: backends and what they import; a load would fail too
            log.debug("checking '%s' failed", self.model_report.name, exc_info=True)
            self.report([Problem("", f"{type(error).__name__}: {error}")])

    def report_warnings(self, group: Mapping[str, Rollout]) -> None:
        """Warns of what is odd in its declaration; `group` has the rollouts of its group's other models."""
        if self.declaration is not None:
            for warning in declaration_warnings(self.declaration, ROLLOUT_FILE, self._versions, group):
                self._collector.add("warning", self._rollout_file, 0, 0, warning.message)

    def _run(self) -> None:
        try:
            written = self._read()
            if written is None:
                self._find_versions([entry[0] for entry in self._source.fingerprint()])
                return
            staged = self._source.stage(lambda done, total: None, lambda: False)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            self.report([Problem("", f"{self.model_report.location} can't be read: {reason}")])
            return
        try:
            self._directory = staged.directory
            self._check(written, [entry[0] for entry in staged.fingerprint])
        finally:
            staged.release()

    def _check(self, written: ModelConfig, paths: Sequence[str]) -> None:
        """Checks a config; `paths` are those of the model's files."""
        self._versions = versions = self._find_versions(paths)
        self._read_rollout()
        config = ModelConfig()
        config.CopyFrom(written)
        self._define(config, paths, versions)
        self.config = config
        self.report(_missing_versions(config, versions), "warning")
        self._select(config, versions)
        self.report(support_problems(config))
        if is_ensemble(config):
            self._finish_ensemble(config, written)
        else:
            self._finish(config, written)
        effective = self.model_report.config
        if effective is not None and self.model_report.certain:
            found = self._backend_found
            of_backend = (
                ((), True, False)
                if found is None
                else (found.parameters, found.passes_parameters, found.takes_host_policies)
            )
            self.report(ineffective_settings(effective, *of_backend), "warning")
        wrong = {finding.path for finding in self.model_report.findings}
        self.report((each for each in _unknown_enum_numbers(written) if each.path not in wrong), "warning")

    def _select(self, config: ModelConfig, versions: Sequence[int]) -> None:
        """Selects the versions that would be loaded."""
        policy = ModelConfig(name=config.name, version_policy=config.version_policy)
        if policy.version_policy.HasField("specific"):  # without missing ones, reported already
            specific = policy.version_policy.specific.versions
            specific[:] = [version for version in specific if version in versions]
        problems: list[Problem] = []
        selected = collect(attempt("version_policy", partial(select_versions, policy, versions)), problems)
        self.report(
            replace(
                each,
                expected="" if versions else "a directory named with a number, such as 1",
                found=f"version directories {', '.join(map(str, versions))}" if versions else "none",
            )
            for each in problems
        )
        self.model_report.versions = tuple(selected or ())

    def _read(self) -> ModelConfig | None:
        """The config as written, without its syntax errors."""
        content = self._content()
        if content is None:
            if self._rules.options.strict_model_config:
                path = f"{self._source.location}/{CONFIG_FILE}"
                message = f"failed to open text file for read {path}: No such file or directory"
                self.report([Problem("", message)])
                return None
            return ModelConfig()
        try:
            check_config_size(len(content), self._rules.options.max_config_bytes, self._source.location)
        except InvalidArgumentError as error:
            self.report([Problem("", error.message)])
            return None
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            before = content[: error.start].decode()
            line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
            self._collector.add("error", self._collector.file, line, column, f"not UTF-8 text: {error}")
            return None
        reading = self._collector.reading = read_text(text)
        self._collector.mistakes(reading)
        return reading.config

    def _content(self) -> bytes | None:
        """Content of the config file; None without one."""
        variant = self._rules.options.model_config_name
        for path in (variant_path(variant), CONFIG_FILE) if variant else (CONFIG_FILE,):
            try:
                content = self._source.read(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except IsADirectoryError:
                if path != CONFIG_FILE:
                    continue
                raise
            self._collector.file = f"{self._source.location}/{path}"
            return content
        return None

    @property
    def _rollout_file(self) -> str:
        return f"{self.model_report.location}/{ROLLOUT_FILE}"

    def _read_rollout(self) -> None:
        path = self._directory / ROLLOUT_FILE
        if path.exists():
            try:
                self.declaration = parse_toml(read_utf8(path), ROLLOUT_FILE)
            except InvalidArgumentError as error:
                self._collector.add("error", self._rollout_file, 0, 0, error.message)

    def _find_versions(self, paths: Sequence[str]) -> list[int]:
        names = {path.partition("/")[0] for path in paths if "/" in path}
        versions, ignored = split_versions(names)
        for name, reason in ignored.items():
            place = f"{self._source.location}/{name}"
            self._collector.add("warning", place, 0, 0, f"ignored as a version directory: its name {reason}")
        return versions

    def _define(self, config: ModelConfig, paths: Sequence[str], versions: Sequence[int]) -> None:
        """The checks of `read_definition`."""
        name = self._source.name
        if config.name and config.name != name:
            self.report(
                [
                    Problem(
                        "name",
                        f"unexpected directory name '{name}' for model '{config.name}', directory name must "
                        f"equal model name",
                        expected=f"'{name}', or none at all",
                    )
                ]
            )
        config.name = name
        start = f"{versions[0]}/" if versions else "/"
        content = {path.removeprefix(start).partition("/")[0] for path in paths if path.startswith(start)}
        first = self._directory / str(versions[0]) if versions else None
        unknown = list(filling_backend(config, content.__contains__, first))
        self.report(unknown)
        agents = NativeAgents(self._rules.options.repoagent_directory)
        self.report(agent_problems(config, name, self._directory, agents))
        self.report(agent_notes(config, agents), "note")
        if self._rules.data_only:
            self.report(_powers(config, paths))
        normalize(config)
        problems = list(config_problems(config))
        if unknown:  # the missing backend is reported already
            self._collector.known.update(
                (each.path, each.message) for each in problems if each.path == "backend"
            )
        self.report(problems)
        if self._rules.options.strict_model_config:
            self.report(tensor_problems(config))

    def _finish_ensemble(self, config: ModelConfig, written: ModelConfig) -> None:
        self.report(tensor_problems(config))
        problems: list[Problem] = []
        extras = collect(read_extras(config, self._directory), problems)
        self.report(problems)
        self._show(written, config, config)
        if not self.model_report.failed:
            for version in self.model_report.versions:
                spec = assemble_spec(config, self._directory, version, "", {}, extras)
                self.model_report.specs[version] = spec

    def _finish(self, config: ModelConfig, written: ModelConfig) -> None:
        backend = self._backend(config)
        self._backend_found = backend
        self.report(runtime_problems(config))
        for version in reversed(self.model_report.versions):  # the newest version decides what is shown
            self._finish_version(config, written, backend, version)
        self._check_files(config)

    def _check_files(self, config: ModelConfig) -> None:
        data = to_json(config)
        for version in self.model_report.versions:
            directory = self._directory / str(version)
            for check in self._rules.file_checks:
                for found in check(data, directory, self._rules.options.backend_directory):
                    if found.file is None:
                        self.report([Problem(found.path, found.message)], found.severity)
                    else:
                        self._collector.add(found.severity, str(found.file), 0, 0, found.message)

    def _backend(self, config: ModelConfig) -> Backend | None:
        if not config.backend:
            return None  # reported already
        try:
            return self._rules.get_backend(config.backend, config.runtime, self._directory)
        except ConchError as error:
            near = nearest(config.backend, self._rules.backends)
            known = config.backend in self._rules.backends
            self.report(
                [
                    Problem(
                        "backend",
                        error.message,
                        expected="" if known else f"one of {', '.join(self._rules.backends)}",
                        found=f"'{config.backend}'",
                        nearest="" if known else near,
                    )
                ]
            )
            return None

    def _finish_version(
        self, config: ModelConfig, written: ModelConfig, backend: Backend | None, version: int
    ) -> None:
        """The checks of building a version, without the backend's own."""
        options = self._rules.options
        completed = ModelConfig()
        completed.CopyFrom(config)
        final = completed
        directory = self._directory / str(version)
        model_file, certain = "", False
        if backend is not None:
            problems: list[Problem] = []
            model_file = collect(checked_model_file(config, backend, self._directory, directory), problems)
            self.report(problems)
            completed.platform = completed.platform or backend.platform
            if not problems:
                completed, certain = self._complete(completed, backend, directory, model_file)
        elif options.strict_model_config:
            certain = True
        final = ModelConfig()
        final.CopyFrom(completed)
        normalize(final)
        self.report(config_problems(final))
        if backend is not None:
            self.report(resolving_groups(final, options.devices, backend))
        self.report(
            problem for problem in tensor_problems(final) if certain or not _completable(problem.path, final)
        )
        # Names of tensors that completion would add can't be checked.
        whole = certain or all(getattr(final, field) for field in _COMPLETED)
        if whole:
            self.report(ragged_problems(final))
        self.report(support_problems(final))
        problems = []
        extras = collect(read_extras(final, self._directory, options.max_queue_size), problems)
        self.report(each for each in problems if whole or "CONCH_PADDING" not in each.path)
        problems = []
        samples = collect(checked_warmup(final, self._directory), problems)
        self.report(problems)
        if not self.model_report.origins:
            self._show(written, completed, final)
        self.model_report.certain &= certain
        if backend is None or self.model_report.failed or not whole:
            return
        spec = assemble_spec(
            final, self._directory, version, model_file, options.options_of(final.backend), extras
        )
        self.model_report.specs[version] = spec
        if not self._may_read(final):
            return
        problems = []
        collect(attempt("", partial(backend.check, spec)), problems)
        self.report(replace(each, path=_tensor_in(each.message, final)) for each in problems)
        if not problems:
            self.report((Problem("", warning) for warning in backend.warnings(spec)), "warning")
        for number, sample in samples:
            problems = []
            collect(
                attempt(f"model_warmup[{number}]", partial(Warmup, spec, [sample], monotonic_ns)), problems
            )
            self.report(problems, "error" if certain else "warning")

    def _complete(
        self, config: ModelConfig, backend: Backend, directory: Path, model_file: str
    ) -> tuple[ModelConfig, bool]:
        """The completed config, and True if completion was exact."""
        options = self._rules.options
        runs_code = type(backend).completion_runs_code
        source = None
        if config.backend == _PYTHON:
            source = self._python_file(directory / model_file)
            if source.error:
                return config, False
        if options.strict_model_config:
            return config, True
        if not self._may_read(config):
            return config, False
        if runs_code and not self._rules.run_code:
            if source is not None and not source.may_complete_config:
                return config, True
            self.report(
                [
                    Problem(
                        "",
                        "the config is not completed: that would run the model's own code, which --run-code "
                        "allows",
                    )
                ],
                "note",
            )
            return config, False
        try:
            return complete(config, backend, directory, options.options_of(config.backend)), True
        except ConchError as error:
            self.report([Problem("", error.message)])
        except (Exception, SystemExit) as error:  # model code may raise anything
            self.report([Problem("", f"completing the config failed: {error}")])
        return config, False

    def _may_read(self, config: ModelConfig) -> bool:
        """True if no code of the config runs when the engine reads the model, or if it may; else notes it."""
        power = None if self._rules.run_code else runs_to_read(config)
        if power is None:
            return True
        text = f"the model is not read: that would run {power}, which --run-code allows"
        self.report([Problem(power.path, text)], "note")
        return False

    def _python_file(self, path: Path) -> PythonFile:
        try:
            source = read_python(path.read_bytes(), str(path))
        except OSError as error:
            source = PythonFile(f"{path} can't be read: {error.strerror}")
        if source.error:
            self._collector.add("error", str(path), source.line, source.column, source.error)
        return source

    def _show(self, written: ModelConfig, completed: ModelConfig, final: ModelConfig) -> None:
        model_report = self.model_report
        model_report.config = final
        model_report.origins = config_origins(written, completed, final)
        if self._collector.reading is not None:
            model_report.place = self._collector.reading.place


def _completable(path: str, config: ModelConfig) -> bool:
    """True if the problem is a missing tensor value that completion may add."""
    return path.startswith(_COMPLETED) and value_at(config, path) is None


def _tensor_in(message: str, config: ModelConfig) -> str:
    """Path of the tensor that a backend's message names, if any."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for number, name in enumerate([tensor.name for tensor in tensors]):
            if f"{kind} '{name}'" in message or f"tensor '{name}'" in message:
                return f"{kind}[{number}]"
    return ""


def _powers(config: ModelConfig, paths: Sequence[str]) -> Problems:
    """Everything that is code, writes files or reaches out, or is not known to be harmless."""
    expected = "data only, as of a registry without --mlflow-allow-code"
    for power in beyond_data(config):
        yield Problem(power.path, f"the model brings {power}", expected=expected)
    for path in filter(is_code, paths):
        yield Problem("", f"the model brings code ('{path}')", expected=expected)


def _missing_versions(config: ModelConfig, versions: Sequence[int]) -> Problems:
    for number, version in enumerate(config.version_policy.specific.versions):
        if version not in versions:
            yield Problem(
                f"version_policy.specific.versions[{number}]",
                f"version {version} is specified for model '{config.name}', but the version directory is not "
                f"present",
                expected=f"one of {', '.join(map(str, versions))}" if versions else "",
            )


def _unknown_enum_numbers(config: ModelConfig) -> Problems:
    """Enum fields set to unknown numbers, as the text format allows."""
    for path, field, value in leaves(config):
        if field.enum_type is None or is_map(field):
            continue
        known = field.enum_type.values_by_number
        for number in value if isinstance(value, list) else [value]:
            if number not in known:
                yield Problem(
                    path,
                    f"{number} is no value of {field.enum_type.name}",
                    expected=f"one of {', '.join(each.name for each in known.values())}",
                )
