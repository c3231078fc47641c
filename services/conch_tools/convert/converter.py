"""Converts a pickle: versions, reading, folder, comparison; nothing is left where the answers differ."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from conch.core.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from conch.core.file_formats import ARCHIVE, PICKLE, identify
from conch.core.temporary_folder import TemporaryFolder
from conch_engines.trees.trusted_types import HARMLESS_TYPES
from conch_testing.conversion import ModelError
from conch_testing.loaded_model import load
from conch_tools.convert.answer_comparison import Difference, compare
from conch_tools.convert.model_folder import FILES, class_note, write_model
from conch_tools.convert.sandboxed_reader import SandboxedReader
from conch_tools.optimize.step_environments import RefusedStepError, StepEnvironment, StepEnvironments

Report = Callable[[str], None]

_WITH = ("skops>=0.11", "joblib", "pandas")
"""Packages beside scikit-learn in an environment that is built."""
_FIRST_WITH_NUMPY_2 = (1, 4, 2)
_FEWEST_ROWS = 1
_VERSION = re.compile(r"[0-9]{1,6}(\.[0-9a-z]{1,12}){0,5}")
"""A version of scikit-learn; other texts of a pickle, such as lines for pip, are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion.

    Attributes:
        source: The pickle.
        out: The model's directory; it must not exist.
        data: A file of rows to compare; None for rows made from the model.
        rows: The most rows.
        trust: Types that the config is to trust.
        environments: Environments to look for the pickle's version of scikit-learn in.
        build: True to build an environment with that version.
        any_version: True to read it with the installed version all the same.
        tolerance: Allowed relative difference; None for the default of each datatype.
        timeout_s: Seconds for each process that reads the pickle.
    """

    source: Path
    out: Path
    data: Path | None = None
    rows: int = 200
    trust: Sequence[str] = ()
    environments: Sequence[Path] = ()
    build: bool = False
    any_version: bool = False
    tolerance: float | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion.

    Attributes:
        differences: Comparisons of the outputs.
        equal: True if no row differs; the model has been written then.
        notes: Lines about the model.
    """

    differences: Sequence[Difference]
    equal: bool
    notes: Sequence[str] = field(default_factory=tuple)


def convert(options: ConvertOptions, report: Report) -> Conversion:
    """Converts a pickle and writes the model, if its answers are the pickle's predictions.

    Raises:
        ConchError: It can't be converted; the text says why.
    """
    _check(options)
    reader = SandboxedReader(options.source, options.timeout_s)
    with TemporaryFolder("conch-convert-") as folder:
        environments = StepEnvironments(
            folder / "environments", options.environments, not options.build, report
        )
        with closing(environments):
            content = folder / "content"
            found = reader.run(environments.own, {"action": "versions"}, content)
            report(f"pickles are read without network and rights to write: {' and '.join(found.layers)}")
            environment = _environment(found.facts["sklearn"], environments, options, report)
            job = {"action": "convert", "data": str(options.data.absolute()) if options.data else ""}
            facts = reader.run(environment, job | {"rows": options.rows}, content).facts
        report(f"{options.source}: {facts['about']}")
        for line in facts["warnings"]:
            report(f"warning of its packages: {line}")
        trusted = _trusted(facts, options)
        model = folder / "converted" / options.out.name
        write_model(model, content, facts, trusted, options.data is not None)
        try:
            with load(model) as loaded:
                differences = compare(loaded, facts, options.tolerance)
        except ModelError as error:
            raise InvalidArgumentError(f"the converted model is not served: {error}") from error
        if not differences:
            raise InvalidArgumentError("the served model has none of the pickle's predictions")
        equal = not any(each.differing for each in differences)
        if equal:
            _install(model, options.out)
        return Conversion(differences, equal, _notes(facts, options))


def _install(model: Path, out: Path) -> None:
    """Copies a model into a repository that a server may read meanwhile."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as unfinished:
            shutil.copytree(model, Path(unfinished) / out.name).rename(out)
    except OSError as error:
        raise InvalidArgumentError(f"--out: '{out}' can't be written: {error.strerror or error}") from error


def _check(options: ConvertOptions) -> None:
    if not options.source.is_file():
        raise NotFoundError(f"there is no file '{options.source}'")
    form = identify(options.source)
    if form not in (None, PICKLE, ARCHIVE):  # joblib compresses as others do
        raise InvalidArgumentError(
            f"'{options.source}' is {form.what} and needs no conversion: {form.advice}"
        )
    if options.data is not None and not options.data.is_file():
        raise NotFoundError(f"--data: there is no file '{options.data}'")
    if options.out.exists():
        raise AlreadyExistsError(f"--out: there is '{options.out}' already; give another name, or remove it")
    if options.rows < _FEWEST_ROWS:
        raise InvalidArgumentError(f"--rows must be at least {_FEWEST_ROWS}, not {options.rows}")


def _environment(
    version: str, environments: StepEnvironments, options: ConvertOptions, report: Report
) -> StepEnvironment:
    """The environment that reads the pickle: with the version of scikit-learn that it names."""
    installed = _installed("scikit-learn")
    if not version:  # a booster's, whose library warns itself
        return environments.own
    if not _VERSION.fullmatch(version):
        raise InvalidArgumentError(f"the pickle says it is of scikit-learn {version!r}, which is no version")
    if version == installed:
        report(f"the pickle is of scikit-learn {version}, which is installed")
        return environments.own
    text = f"the pickle is of scikit-learn {version}, and {installed or 'none'} is installed"
    if options.build or options.environments:
        try:
            found = environments.find(f"scikit-learn-{version}", _requirements(version))
        except RefusedStepError as error:
            raise InvalidArgumentError(f"{text}; no environment has it: {error}") from error
        report(f"{text}: it is read with {version}, and compared with what {installed} serves")
        return found
    if options.any_version:
        report(f"warning: {text}; what both read alike is compared, and may differ from {version}")
        return environments.own
    raise InvalidArgumentError(
        f"{text}: another version reads some models wrongly without an error, such as TfidfVectorizer of "
        f"1.4, so that there would be nothing to compare with. Give --build to build an environment with "
        f"{version}, --environment with one, or --any-version to read it all the same"
    )


def _requirements(version: str) -> list[str]:
    numbers = tuple(int(each) for each in version.split(".")[:3] if each.isdecimal())
    older = numbers < _FIRST_WITH_NUMPY_2
    return [f"scikit-learn=={version}", *_WITH, *(["numpy<2"] if older else [])]


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _trusted(facts: Mapping[str, Any], options: ConvertOptions) -> list[str]:
    """Types that the config has to trust, all of which the user has named."""
    foreign = sorted(set(facts.get("types", ())) - HARMLESS_TYPES)
    if unnamed := sorted(set(foreign) - set(options.trust)):
        raise InvalidArgumentError(
            f"the model has types that could run code when they are loaded: {', '.join(unnamed)}; save its "
            f"parts by themselves, or give --trust {','.join(unnamed)} if they are yours"
        )
    if unused := sorted(set(options.trust) - set(foreign)):
        raise InvalidArgumentError(f"--trust names {', '.join(unused)}, which the model does not have")
    return foreign


def _notes(facts: Mapping[str, Any], options: ConvertOptions) -> list[str]:
    notes = [f"converted to {options.out / '1' / FILES[facts['kind']]} for backend {facts['kind']}"]
    count = max((len(each["values"]) for each in facts["rows"].values()), default=0)
    if options.data is None:
        notes.append(f"compared: {count} made rows of {facts['made']}; --data compares yours")
    else:
        notes.append(f"compared: {count} rows of {options.data}")
    if facts["dropped"]:
        notes.append(f"{facts['dropped']} rows without a text are left out: a request holds no missing text")
    if note := class_note(facts):
        notes.append(note)
    return notes
