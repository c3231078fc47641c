"""Environments of steps: this process's if it has the packages, a given one, or one of the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from conch.core.errors import ConchError, UnavailableError
from conch.workers.environment_spec import EnvironmentSpec
from conch_environments.building import allows
from conch_environments.interpreter import activated, find_python

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<versions>.*)")
_OTHER_NAMES = {
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime-openvino"),
    "xgboost-cpu": ("xgboost",),
    "tensorflow-cpu": ("tensorflow",),
}
"""Packages with the same modules."""

_PROBE = """
import json
from importlib import metadata
print(json.dumps({each.name: each.version for each in metadata.distributions() if each.name}))
"""
_PROBE_TIMEOUT_S = 120


class RefusedStepError(UnavailableError):
    """A step is not possible here; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class StepEnvironment:
    """An interpreter, its variables, and the versions of all packages by normalised name."""

    python: str
    variables: Mapping[str, str]
    packages: Mapping[str, str]

    def missing(self, requires: Sequence[str]) -> list[str]:
        """The requirements that it does not meet."""
        return [each for each in requires if not self.version_of(each)]

    def version_of(self, requirement: str) -> str:
        """The version that meets a requirement; empty if none does."""
        match = _REQUIREMENT.fullmatch(requirement)
        assert match is not None, requirement
        for name in (match["name"], *_OTHER_NAMES.get(match["name"], ())):
            version = self.packages.get(_normal(name))
            if version is not None and allows(match["versions"], _numbers(version)):
                return version
        return ""


class StepEnvironments:
    """Finds an environment for each step; `close` lets the cache remove those that were built.

    Args:
        folder: Directory of the package lists for the builder.
        prepared: Directories of environments to look in before one is built.
        offline: True to build none.
        report: Called with a line before one is built.
    """

    def __init__(
        self, folder: Path, prepared: Sequence[Path], offline: bool, report: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._offline = offline
        self._report = report
        self._built: dict[tuple[str, ...], StepEnvironment | ConchError] = {}
        self._stack = ExitStack()
        own = {_normal(each.name): each.version for each in metadata.distributions() if each.name}
        self._known = [StepEnvironment(sys.executable, dict(os.environ), own)]
        for path in prepared:
            label = f"environment '{path}'"
            self._known.append(
                _probed(str(find_python(path.absolute(), label)), activated(path.absolute()), label)
            )

    @property
    def own(self) -> StepEnvironment:
        """Environment of this process."""
        return self._known[0]

    def find(self, name: str, requires: Sequence[str]) -> StepEnvironment:
        """The environment of a step.

        Raises:
            RefusedStepError: Packages are missing, and no environment may be built.
            ConchError: The environment can't be built.
        """
        for each in self._known:
            if not each.missing(requires):
                return each
        if self._offline:
            missing = ", ".join(f"'{each}'" for each in self.own.missing(requires))
            raise RefusedStepError(
                f"needs {missing}, not installed here; --offline builds no environment for it"
            )
        key = tuple(requires)
        if key not in self._built:
            try:
                self._built[key] = self._build(name, requires)
            except ConchError as error:
                self._built[key] = error
        found = self._built[key]
        if isinstance(found, ConchError):
            raise found
        return found

    def close(self) -> None:
        """Releases the environments."""
        self._stack.close()

    def _build(self, name: str, requires: Sequence[str]) -> StepEnvironment:
        self._report(f"{name}: finds or builds an environment with {', '.join(requires)}")
        version = self._folder / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "requirements.txt").write_text("".join(f"{each}\n" for each in requires))
        environment = EnvironmentSpec.read(name, version, "", {}, {}).make()
        self._stack.callback(environment.release)
        return _probed(str(environment.python), environment.variables, environment.label)


def _probed(python: str, variables: Mapping[str, str], label: str) -> StepEnvironment:
    try:
        output = subprocess.run(
            [python, "-c", _PROBE],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_PROBE_TIMEOUT_S,
        ).stdout
        packages = json.loads(output.decode().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UnavailableError(f"{label}: its packages can't be listed: {error}") from error
    return StepEnvironment(python, variables, {_normal(name): version for name, version in packages.items()})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """Three numbers of a version such as ``2.13.0+cpu``."""
    parts = [int(each) for each in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return (*parts, 0, 0, 0)[:3]
