"""Checks repositories: each model alone, then ensembles against their composing models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from conch.core.errors import InvalidArgumentError
from conch.core.spec import EnsembleScheduling, EnsembleStep, ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.findings import Report
from conch_check.model_checks import ModelCheck, Rules
from conch_control.config.ensembles import checked_plan, step_path
from conch_control.config.platforms import is_ensemble
from conch_control.config.problems import Problem, Problems, collect, entry_path, nearest
from conch_control.config.validate import config_problems, uncacheable_text
from conch_control.lifecycle.ensemble_loader import cycle_text
from conch_control.repository.dependency_graph import Graph, build_graph, find_cycles
from conch_control.repository.source import ModelSource, Repository


class UnknownModelError(LookupError):
    """No repository has the requested model."""


def check_repositories(
    repositories: Iterable[Repository], rules: Rules, only: Collection[str] = ()
) -> Report:
    """Checks all models of the repositories, or `only` some and their composing models.

    Raises:
        UnknownModelError: No repository has one of the models in `only`.
    """
    unique = {each.location: each for each in repositories}
    report = Report(tuple(unique))
    sources: dict[str, list[ModelSource]] = {}
    unreadable: dict[str, str] = {}
    for location, repository in unique.items():
        try:
            found = repository.models()
        except OSError as error:
            unreadable[location] = error.strerror or str(error)
            continue
        for name, source in found.items():
            sources.setdefault(name, []).append(source)
    report.unreadable = unreadable
    for name in only:
        if name not in sources and not unreadable:
            near = nearest(name, sources)
            raise UnknownModelError(
                f"no repository has a model '{name}'{f'; did you mean {near!r}?' if near else ''}"
            )
    names = sorted(set(only).intersection(sources) if only else sources)
    checks: dict[str, list[ModelCheck]] = {}

    def check(name: str) -> tuple[str, ...]:
        """Checks the models of a name; returns what they are made of."""
        made = checks[name] = [ModelCheck(source, rules) for source in sources.get(name, ())]
        parts: dict[str, None] = {}
        for each in made:
            each.run()
            if each.config is not None:
                parts.update(dict.fromkeys(step.model_name for step in each.config.ensemble_scheduling.step))
        return tuple(part for part in parts if part)

    build_graph(names, check)
    for name, each in checks.items():
        for one in each if len(each) > 1 else ():
            others = [other.model_report.location for other in each if other is not one]
            one.report(
                [
                    Problem(
                        "",
                        f"model '{name}' appears in two or more repositories",
                        expected="a name of its own",
                        found=f"also in {', '.join(others)}",
                    )
                ]
            )
    alone = {name: each[0] for name, each in checks.items() if len(each) == 1}
    check_ensembles(alone, {name for name, each in sources.items() if len(each) > 1})
    check_rollouts(alone)
    for each in checks.values():
        for one in each:
            one.sort()
    report.models = [each.model_report for name in names for each in checks[name]]
    return report


def check_rollouts(checks: Mapping[str, ModelCheck]) -> None:
    """Warns of odd declarations of rollouts, also against those of the other models of a group."""
    rollouts = {
        name: check.declaration.rollout
        for name, check in checks.items()
        if check.declaration is not None and check.declaration.rollout is not None
    }
    for name, check in checks.items():
        group = rollouts[name].group if name in rollouts else ""
        others = {other: each for other, each in rollouts.items() if other != name and each.group == group}
        check.report_warnings(others if group else {})


_QUEUE_SIZE = "CONCH_MAX_QUEUE_SIZE"


class _UnknownError(InvalidArgumentError):
    """A composing model's tensors are unknown, which is reported for that model."""


def check_ensembles(checks: Mapping[str, ModelCheck], duplicates: Collection[str]) -> None:
    """Checks all ensembles, composing ones first."""

    def parts(name: str) -> tuple[str, ...]:
        config = None if name not in checks else checks[name].config
        steps = () if config is None else config.ensemble_scheduling.step
        return tuple(dict.fromkeys(step.model_name for step in steps if step.model_name))

    graph = build_graph(checks, parts)
    cyclic = find_cycles(graph)
    done: set[str] = set()
    # Cyclic ones last in the list, so that they are checked first.
    unseen = sorted((name for name in graph if graph[name]), key=lambda name: (name in cyclic, name))
    while unseen:
        name = unseen[-1]
        waiting = [part for part in graph[name] if graph[part] and part not in done and part not in cyclic]
        if waiting and name not in done and name not in cyclic:
            unseen += waiting
            continue
        unseen.pop()
        if name not in done:
            done.add(name)
            _EnsembleCheck(checks, duplicates, graph).run(name, cyclic.get(name))


class _EnsembleCheck:
    """The check of one ensemble."""

    def __init__(self, checks: Mapping[str, ModelCheck], duplicates: Collection[str], graph: Graph) -> None:
        self._checks = checks
        self._duplicates = duplicates
        self._graph = graph

    def run(self, name: str, last_in_cycle: str | None) -> None:
        """Checks an ensemble; `last_in_cycle` closes its cycle, if any."""
        check = self._checks[name]
        model_report, config = check.model_report, check.config
        if config is None or not is_ensemble(config):
            return
        # Partly known models may differ from what was checked.
        parts = (self._checks[part].model_report for part in self._graph[name] if part in self._checks)
        certain = all(part.certain for part in parts)
        if last_in_cycle is not None:
            check.report([self._circle(config, last_in_cycle)])
        check.report(self._step_problems(config))
        if last_in_cycle is not None or not model_report.specs:
            model_report.specs.clear()
            return
        spec = model_report.specs[max(model_report.specs)]
        problems: list[Problem] = []
        plan = collect(checked_plan(spec, self._find), problems)
        check.report(
            (each for each in problems if each.kind is not _UnknownError), "error" if certain else "warning"
        )
        model_report.certain = certain
        if plan is not None:
            check.report(self._whole_problems(config, spec, plan.decoupled))
        for version, made in list(model_report.specs.items()):
            if model_report.failed or plan is None:
                del model_report.specs[version]
            else:
                model_report.specs[version] = replace(made, decoupled=plan.decoupled)

    def _circle(self, config: ModelConfig, last_in_cycle: str) -> Problem:
        number = next(
            (
                number
                for number, step in enumerate(config.ensemble_scheduling.step)
                if config.name in self._reach(step.model_name)
            ),
            0,
        )
        return Problem(
            f"{step_path(number)}.model_name",
            cycle_text(config.name, last_in_cycle),
            expected="a model that is not made of this one",
        )

    def _reach(self, name: str) -> set[str]:
        """A model and all its composing models."""
        seen: set[str] = set()
        unseen = [name]
        while unseen:
            current = unseen.pop()
            if current not in seen:
                seen.add(current)
                unseen += self._graph.get(current, ())
        return seen

    def _step_problems(self, config: ModelConfig) -> Problems:
        """Missing composing models."""
        name = config.name
        for number, step in enumerate(config.ensemble_scheduling.step):
            path, part = step_path(number), step.model_name
            if not part:
                continue  # reported already
            if part not in self._checks:
                yield Problem(
                    f"{path}.model_name",
                    f"ensemble {name} contains models that are not available or ambiguous: {part}",
                    expected="a model that is in one of the repositories"
                    if part in self._duplicates
                    else "a model of the repositories",
                    found=f"'{part}', which is in two or more repositories"
                    if part in self._duplicates
                    else f"'{part}'",
                    nearest=nearest(part, set(self._checks) - {name}),
                )
                continue
            model_report = self._checks[part].model_report
            if model_report.failed and part != name:
                yield Problem(
                    f"{path}.model_name",
                    f"ensemble '{name}' depends on '{part}' which has no loaded version: it has errors "
                    f"itself",
                    expected="a model without errors",
                )
            elif step.model_version >= 0 and step.model_version not in model_report.versions:
                yield Problem(
                    f"{path}.model_version",
                    f"ensemble '{name}' depends on '{part}' whose required version {step.model_version} is "
                    f"not loaded.",
                    expected=f"-1 for the newest, or one of {', '.join(map(str, model_report.versions))}",
                )

    def _find(self, step: EnsembleStep) -> ModelSpec:
        check = self._checks.get(step.model_name)
        specs = {} if check is None else check.model_report.specs
        version = max(specs, default=0) if step.model_version < 0 else step.model_version
        if version not in specs:
            raise _UnknownError(step.model_name)
        return specs[version]

    def _whole_problems(self, config: ModelConfig, spec: ModelSpec, decoupled: bool) -> Problems:
        """Problems that only the composing models reveal."""
        whole = ModelConfig()
        whole.CopyFrom(config)
        whole.model_transaction_policy.decoupled = decoupled
        yield from config_problems(whole)
        if spec.max_queue_size:
            yield Problem(
                f"{entry_path('parameters', _QUEUE_SIZE)}.string_value",
                f"a maximum queue size can not be specified for ensemble '{config.name}': its models have "
                f"the queues",
                expected="nothing",
            )
        if spec.cached and any(part.sequence is not None for part in self._all_parts(spec.ensemble)):
            yield Problem(
                "response_cache.enable",
                uncacheable_text(config.name, "sequence batching scheduler"),
                expected="false",
            )

    def _all_parts(self, scheduling: EnsembleScheduling | None) -> Iterator[ModelSpec]:
        for step in () if scheduling is None else scheduling.steps:
            spec = self._find(step)
            yield spec
            yield from self._all_parts(spec.ensemble)
