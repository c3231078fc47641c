"""Checks repositories: every model by itself, then what they have to do with each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from conch_control.check.ensembles import check_ensembles
from conch_control.check.findings import Report
from conch_control.check.model import ModelCheck, Rules
from conch_control.config.problems import Problem
from conch_control.config.suggest import nearest
from conch_control.dependencies import build_graph
from conch_control.repository.source import ModelSource, Repository


class UnknownModelError(LookupError):
    """A model to be checked is in none of the repositories."""


def check_repositories(
    repositories: Iterable[Repository], rules: Rules, only: Collection[str] = ()
) -> Report:
    """Checks all models of some repositories.

    Args:
        repositories: The repositories.
        rules: How to check.
        only: Names of the models to report; all of them if empty. What they are made of is checked for them.

    Returns:
        What was found.

    Raises:
        UnknownModelError: None of the repositories has one of the models to report.
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
            others = [other.checkup.location for other in each if other is not one]
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
    for each in checks.values():
        for one in each:
            one.sort()
    report.models = [each.checkup for name in names for each in checks[name]]
    return report
