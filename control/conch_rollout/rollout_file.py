"""Reads rollout declarations: `rollout.toml` in a model's directory, or the same fields in JSON.

A wrong field is a `Problem` with its path; its message names the place, the field and what belongs there.
Reading raises the first one, `check_declaration` returns all. Pure but for `read_rollout_file`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from conch.core.errors import InvalidArgumentError
from conch.core.version_text import LABEL_PATTERN
from conch_control.config.problems import Problem, nearest

STABLE = "stable"
"""Label of the version that an empty version means."""
NEWEST = "newest"
"""Candidate: the newest version above the stable one."""
WHOLE = 10_000
"""All of the traffic; weights are parts of it."""
DEFAULT_STEPS = ("1% 5m", "5% 10m", "25% 10m", "50% 10m")

LEAST_SLOWER = 0.01
"""Share of requests above stable's p99 that is expected of an equal version."""

_S = 1_000_000_000
DEFAULT_KEEP_NS = 15 * 60 * _S
_MAX_VERSION = 2**63 - 1
_MOST_LABELS = 64
_MOST_STEPS = 100
_MOST_SPLIT = 16
_LONGEST_NS = 366 * 86_400 * _S

_LABEL = re.compile(LABEL_PATTERN)
_STEP = re.compile(r"(?P<shadow>shadow\s+)?(?P<percent>\d{1,3}(?:\.\d{1,2})?)\s*%\s+(?P<duration>\S+)")
_DURATION = re.compile(r"(?:\d{1,9}(?:ms|s|m|h|d))+")
_AMOUNT = re.compile(r"(\d+)(ms|s|m|h|d)")
_UNITS_NS = {"ms": _S // 1000, "s": _S, "m": 60 * _S, "h": 3600 * _S, "d": 86_400 * _S}
_HEADER = r"[A-Za-z0-9_.\-]{1,128}"
_STICKY = re.compile(rf"sequence|principal|header:{_HEADER}")
_MATCH = re.compile(rf"principal:.+|header:{_HEADER}=.+")

T = TypeVar("T")


class OnInconclusive(Enum):
    """Action at the end of a step whose traffic allows no verdict."""

    PAUSE = "pause"
    ABORT = "abort"
    ADVANCE = "advance"


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """A step of a rollout.

    Attributes:
        weight: The candidate's share of the traffic, of `WHOLE`; 0 in a shadow step.
        shadow: Share of the requests that the candidate gets a copy of, of `WHOLE`.
        least_ns: Least duration.
    """

    weight: int
    shadow: int
    least_ns: int

    def __str__(self) -> str:
        kind, share = ("shadow ", self.shadow) if self.shadow else ("", self.weight)
        return f"{kind}{percent(share)} {duration(self.least_ns)}"


@dataclass(frozen=True, slots=True)
class Guard:
    """Limits for the candidate, against stable in the same window; None for no limit.

    Attributes:
        requests: Requests of each side, and shadow pairs, that a verdict needs.
        failures: Failing verdicts in a row that abort the rollout.
        errors: Most additional share of failures.
        slower: Most share of requests above stable's p99.
        p99_ms: Most milliseconds of the candidate's p99.
        mismatch: Most share of shadow pairs whose outputs differ.
    """

    requests: int = 200
    failures: int = 2
    errors: float | None = None
    slower: float | None = None
    p99_ms: float | None = None
    mismatch: float | None = None


@dataclass(frozen=True, slots=True)
class Compare:
    """Rules by which the outputs of a shadow pair are compared.

    Attributes:
        atol: Absolute tolerance of floats.
        rtol: Tolerance relative to stable's value.
        ignore: Names of outputs that are not compared.
        top1: Names of outputs of which only the place of the largest element counts.
        topk: Names of outputs of which only the places of the k largest elements count, each with k.
    """

    atol: float = 1e-3
    rtol: float = 1e-3
    ignore: tuple[str, ...] = ()
    top1: tuple[str, ...] = ()
    topk: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Shadow:
    """Limits of shadow steps; `inflight` copies run at once, `copy_regions` copies shared-memory inputs."""

    inflight: int = 16
    copy_regions: bool = False
    compare: Compare = field(default_factory=Compare)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The table ``[rollout]``.

    Attributes:
        candidate: A version, or `NEWEST`.
        steps: The steps before all traffic moves; empty with a split.
        sticky: Attributes that give a request its side, by the first that it has: ``sequence``,
            ``principal``, ``header:NAME``.
        match: Requests that always get the candidate: ``header:NAME=VALUE``, ``principal:PATTERN``.
        group: Models of one group give one key the same side; empty for the model alone.
        keep_ns: Time for which the old version stays loaded after promotion.
        split: Versions with their shares of `WHOLE`, stable first, until the file changes; empty for none.
        override: True if a request may choose its version by ``conch-version``.
    """

    candidate: int | str = NEWEST
    steps: tuple[RolloutStep, ...] = ()
    sticky: tuple[str, ...] = ()
    match: tuple[str, ...] = ()
    group: str = ""
    keep_ns: int = 0
    split: tuple[tuple[int, int], ...] = ()
    on_inconclusive: OnInconclusive = OnInconclusive.PAUSE
    override: bool = True
    guard: Guard = field(default_factory=Guard)
    shadow: Shadow = field(default_factory=Shadow)

    @property
    def digest(self) -> str:
        """Equal for equal tables, however they are written."""
        return hashlib.blake2b(json.dumps(_rollout_fields(self)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Declaration:
    """Labels and rollout of a model; `rollout` is None for labels alone."""

    labels: Mapping[str, int] = field(default_factory=dict)
    rollout: Rollout | None = None

    @property
    def stable(self) -> int | None:
        """The version with the label ``stable``, if any."""
        return self.labels.get(STABLE)


def read_rollout_file(path: Path) -> Declaration:
    """Reads a ``rollout.toml``.

    Raises:
        InvalidArgumentError: It can't be read, or a field is wrong; the text names file, field and fix.
    """
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The content of a file. Raises InvalidArgumentError: it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{path} is not UTF-8; write it as text") from None


def parse_toml(text: str, place: str) -> Declaration:
    """A declaration from TOML; `place` names the file in errors. Raises InvalidArgumentError: it is wrong."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"{place} is not TOML: {error}") from None
    return _first_raised(content, place)


def parse_json(text: str | bytes, place: str) -> Declaration:
    """A declaration from JSON; `place` names the request in errors. Raises InvalidArgumentError: wrong."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{place} is not JSON: {error}") from None
    return _first_raised(content, place)


def as_json(declaration: Declaration) -> dict[str, Any]:
    """The fields of a declaration, as `parse_json` reads them."""
    fields: dict[str, Any] = {"labels": dict(declaration.labels)} if declaration.labels else {}
    if declaration.rollout is not None:
        fields["rollout"] = _rollout_fields(declaration.rollout)
    return fields


def check_declaration(content: object, place: str) -> tuple[Declaration, list[Problem]]:
    """A declaration from parsed TOML or JSON, valid only without problems."""
    problems: list[Problem] = []
    top = _Table(content, "", place, problems)
    labels = _labels(top.table("labels"))
    rollout = _rollout(top.table("rollout"), labels) if top.has("rollout") else None
    top.refuse_others()
    return Declaration(labels, rollout), problems


def declaration_warnings(
    declaration: Declaration, place: str, versions: Collection[int], group: Mapping[str, Rollout]
) -> Iterator[Problem]:
    """Warnings about settings that are allowed, and probably mistakes.

    Args:
        declaration: A declaration without problems.
        place: Names the file in the messages.
        versions: Versions that have a directory.
        group: Rollouts of the other models of its group, by model.
    """
    for label, version in declaration.labels.items():
        if version not in versions:
            yield _doubt(
                place, f"labels.{label}", f"version {version} has no directory; the label waits for it"
            )
    rollout = declaration.rollout
    if rollout is None:
        return
    named = {f"rollout.split.{version}": version for version, _ in rollout.split}
    if isinstance(rollout.candidate, int):
        named["rollout.candidate"] = rollout.candidate
    for path, version in named.items():
        if version not in versions:
            yield _doubt(place, path, f"version {version} has no directory")
    weight = 0
    for number, step in enumerate(rollout.steps):
        if step.weight < weight and not step.shadow:
            fall = f"falls from {percent(weight)} to {percent(step.weight)}; steps should grow"
            yield _doubt(place, f"rollout.steps[{number}]", fall)
        weight = max(weight, step.weight)
    for model, other in sorted(group.items()):
        if other.steps != rollout.steps:
            text = f"differ from those of '{model}', which is in the same group; give both the same steps"
            yield _doubt(place, "rollout.steps", text)


def _doubt(place: str, path: str, text: str) -> Problem:
    return Problem(path, f"{place}: {path}: {text}")


def percent(share: int) -> str:
    """A share of `WHOLE` as text, such as ``12.5%``."""
    return f"{share / 100:g}%"


def duration(ns: int) -> str:
    """A duration as text, such as ``1h30m``."""
    if not ns:
        return "0s"
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, ns = divmod(ns, _UNITS_NS[unit])
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts)


def is_label(text: str) -> bool:
    """True for a valid label: a letter, then letters, digits, ``_``, ``-``, ``.``; at most 64 characters."""
    return _LABEL.fullmatch(text) is not None


def _first_raised(content: object, place: str) -> Declaration:
    declaration, problems = check_declaration(content, place)
    for problem in problems:
        raise problem.error()
    return declaration


class _Table:
    """A table's fields; a wrong one adds a problem and has its default."""

    def __init__(self, content: object, path: str, place: str, problems: list[Problem]) -> None:
        self.path = path
        self._place = place
        self._problems = problems
        self._known: list[str] = []
        self._fields: dict[str, Any] = content if isinstance(content, dict) else {}
        if not isinstance(content, dict):
            self._add(path, "must be a table with named fields", content)

    def has(self, key: str) -> bool:
        """True if the field is given; it may be."""
        self._known.append(key)
        return key in self._fields

    def given(self) -> Iterable[tuple[str, Any]]:
        """All fields, of a table with names of its own."""
        return self._fields.items()

    def refuse(self, key: str, fix: str) -> None:
        """Adds a problem of a field."""
        self._add(self._path_of(key), fix, self._fields.get(key))

    def table(self, key: str) -> _Table:
        """A table inside this one; empty if it is missing."""
        return _Table(self._get(key, {}), self._path_of(key), self._place, self._problems)

    def read(self, key: str, default: T, valid: Callable[[Any], T | None], fix: str) -> T:
        """A field; `valid` returns its value, or None for a wrong one."""
        given = self._get(key, None)
        if key not in self._fields:
            return default
        value = valid(given)
        if value is None:
            self.refuse(key, fix)
            return default
        return value

    def texts(self, key: str, pattern: re.Pattern[str], fix: str, most: int = 64) -> tuple[str, ...]:
        """A list of texts that match a pattern, each once."""
        given = self._get(key, [])
        if not isinstance(given, list) or len(given) > most:
            self.refuse(key, f"must be a list of at most {most} texts")
            return ()
        for number, text in enumerate(given):
            at = f"{self._path_of(key)}[{number}]"
            if not isinstance(text, str) or pattern.fullmatch(text) is None:
                self._add(at, fix, text)
            elif text in given[:number]:
                self._add(at, "is given twice; remove one", text)
        return tuple(text for text in given if isinstance(text, str))

    def add(self, key: str, number: int, fix: str, value: object) -> None:
        """Adds a problem of a list's element."""
        self._add(f"{self._path_of(key)}[{number}]", fix, value)

    def refuse_others(self) -> None:
        """Refuses the fields that were not read."""
        for key in self._fields:
            if key not in self._known:
                near = nearest(key, self._known)
                hint = (
                    f"did you mean '{near}'?"
                    if near
                    else f"known are {', '.join(dict.fromkeys(self._known))}"
                )
                message = f"{self._place}: {self._path_of(key)}: unknown field; {hint}"
                self._problems.append(Problem(self._path_of(key), message, nearest=near))

    def _get(self, key: str, default: Any) -> Any:
        self._known.append(key)
        return self._fields.get(key, default)

    def _path_of(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _add(self, path: str, fix: str, found: object) -> None:
        shown = _shown(found)
        message = f"{self._place}: {path + ': ' if path else ''}{fix}, not {shown}"
        self._problems.append(Problem(path, message, fix, shown))


def _shown(value: object) -> str:
    """A wrong value as TOML and JSON write it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a date of TOML
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _labels(table: _Table) -> dict[str, int]:
    labels: dict[str, int] = {}
    for name, version in table.given():
        if not is_label(name):
            table.refuse(
                name,
                "a label is a letter, then up to 63 letters, digits, '_', '-' or '.'; rename it",
            )
        elif name in ("candidate", NEWEST):
            table.refuse(name, "this name is the rollout's own; choose another label")
        elif (number := _version(version)) is None:
            table.refuse(name, "must be a version, a number from 1")
        else:
            labels[name] = number
    if len(labels) > _MOST_LABELS:
        table.refuse(max(labels), f"a model has at most {_MOST_LABELS} labels; remove some")
    return labels


def _rollout(table: _Table, labels: Mapping[str, int]) -> Rollout:
    split = _split(table, labels)
    steps = () if split else _steps(table)
    if split:
        for key in ("candidate", "steps", "guard", "shadow", "keep", "on_inconclusive"):
            if table.has(key):
                table.refuse(key, "has no effect with a split; remove it, or the split")
    newest: int | str = NEWEST
    rollout = Rollout(
        candidate=table.read("candidate", newest, _candidate, 'must be "newest" or a version, from 1'),
        steps=steps,
        sticky=_lowered(table.texts("sticky", _STICKY, 'must be "sequence", "principal" or "header:NAME"')),
        match=_lowered(table.texts("match", _MATCH, 'must be "header:NAME=VALUE" or "principal:PATTERN"')),
        group=table.read(
            "group", "", _label, "must be a name of letters, digits, '_', '-' or '.', from a letter"
        ),
        keep_ns=0
        if split
        else table.read("keep", DEFAULT_KEEP_NS, _nanoseconds, 'must be a duration such as "15m"'),
        split=split,
        on_inconclusive=table.read(
            "on_inconclusive", OnInconclusive.PAUSE, _on_inconclusive, 'must be "pause", "abort" or "advance"'
        ),
        override=table.read("override", True, _override, 'must be "any" or "none"'),
        guard=_guard(table.table("guard"), any(step.shadow for step in steps)),
        shadow=_shadow(table.table("shadow")),
    )
    if not split and table.has("shadow") and not any(step.shadow for step in steps):
        table.refuse("shadow", 'needs a step such as "shadow 100% 10m"; add one, or remove the table')
    table.refuse_others()
    return rollout


def _lowered(readers: Iterable[str]) -> tuple[str, ...]:
    """Sticky keys or matches with names of headers in lower case, as front ends have them."""
    found = []
    for reader in readers:
        name, equals, value = reader.partition("=")
        found.append(f"{name.lower()}{equals}{value}" if reader.startswith("header:") else reader)
    return tuple(found)


def _steps(table: _Table) -> tuple[RolloutStep, ...]:
    given = table.read(
        "steps", list(DEFAULT_STEPS), _non_empty_list, f"must be a list of 1 to {_MOST_STEPS} steps"
    )
    steps = []
    for number, text in enumerate(given):
        step = _step(text)
        if step is None:
            table.add(
                "steps",
                number,
                'must be a percent from 0.01 to 100 and a duration, such as "5% 10m" or "shadow 100% 10m"',
                text,
            )
        else:
            steps.append(step)
    return tuple(steps)


def _split(table: _Table, labels: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    if not table.has("split"):
        return ()
    shares: list[tuple[int, int]] = []
    inner = table.table("split")
    for key, value in inner.given():
        version = _version(int(key)) if key.isascii() and key.isdigit() and len(key) < 20 else None
        share = _share(value)
        if version is None or key.startswith("0"):
            inner.refuse(key, "the names in a split are versions, numbers from 1")
        elif share is None:
            inner.refuse(key, "must be a percent from 0 to 100, with at most two decimals")
        else:
            shares.append((version, share))
    if not 2 <= len(shares) <= _MOST_SPLIT or sum(share for _, share in shares) != WHOLE:
        table.refuse(
            "split",
            f"must have 2 to {_MOST_SPLIT} versions whose percents add up to 100, such as "
            '{ "7" = 90, "8" = 10 }',
        )
        return ((1, WHOLE // 2), (2, WHOLE // 2))  # a split, so that its other fields are checked as such
    shares.sort(key=lambda each: (each[0] != labels.get(STABLE), each[0]))
    if STABLE in labels and shares[0][0] != labels[STABLE]:
        table.refuse("split", f"must contain version {labels[STABLE]}, which labels.stable names")
    return tuple(shares)


def _guard(table: _Table, shadows: bool) -> Guard:
    share = "must be a share from 0 to below 1, such as 0.01"
    guard = Guard(
        requests=table.read("requests", Guard().requests, _whole(1, 10**9), "must be a number from 1"),
        failures=table.read("failures", Guard().failures, _whole(1, 1000), "must be a number from 1 to 1000"),
        errors=table.read("errors", None, _real(0, 1), share),
        slower=table.read(
            "slower",
            None,
            _real(LEAST_SLOWER, 1),
            "must be a share from 0.01 to below 1, as 1 % of equal versions' requests are above the p99",
        ),
        p99_ms=table.read("p99_ms", None, _real(1e-3, 1e9), "must be milliseconds, more than 0"),
        mismatch=table.read("mismatch", None, _real(0, 1), share),
    )
    if guard.mismatch is not None and not shadows:
        table.refuse("mismatch", 'compares shadow pairs; add a step such as "shadow 100% 10m", or remove it')
    limits = (guard.errors, guard.slower, guard.p99_ms, guard.mismatch)
    for key in ("requests", "failures"):
        if table.has(key) and limits == (None,) * 4:
            table.refuse(key, "has no effect without a limit; add errors, slower, p99_ms or mismatch")
    table.refuse_others()
    return guard


def _shadow(table: _Table) -> Shadow:
    inner = table.table("compare")
    compare = Compare(
        atol=inner.read("atol", Compare().atol, _real(0, math.inf), "must be a number from 0"),
        rtol=inner.read("rtol", Compare().rtol, _real(0, math.inf), "must be a number from 0"),
        ignore=inner.texts("ignore", re.compile(".+"), "must be the name of an output", 1000),
        top1=inner.texts("top1", re.compile(".+"), "must be the name of an output", 1000),
        topk=_topk(inner.table("topk")) if inner.has("topk") else (),
    )
    kinds = {"ignore": compare.ignore, "top1": compare.top1, "topk": [name for name, _ in compare.topk]}
    seen: dict[str, str] = {}
    for kind, names in kinds.items():
        for name in names:
            if seen.setdefault(name, kind) != kind:
                inner.refuse(kind, f"output '{name}' is in {seen[name]} too; remove it from one of them")
    inner.refuse_others()
    shadow = Shadow(
        inflight=table.read(
            "inflight", Shadow().inflight, _whole(1, 10_000), "must be a number from 1 to 10000"
        ),
        copy_regions=table.read("copy_regions", False, _bool, "must be true or false"),
        compare=compare,
    )
    table.refuse_others()
    return shadow


def _topk(table: _Table) -> tuple[tuple[str, int], ...]:
    valid = _whole(1, 10**6)
    names = [name for name, _ in table.given()]
    return tuple((name, table.read(name, 1, valid, "must be a number from 1")) for name in names)


def _whole(least: int, most: int) -> Callable[[Any], int | None]:
    def valid(value: Any) -> int | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and least <= value <= most else None

    return valid


def _real(least: float, below: float) -> Callable[[Any], float | None]:
    def valid(value: Any) -> float | None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number and least <= value < below else None

    return valid


_version = _whole(1, _MAX_VERSION)


def _candidate(value: Any) -> int | str | None:
    return NEWEST if value == NEWEST else _version(value)


def _share(value: Any) -> int | None:
    """A percent as a share of `WHOLE`; None if it is none, or has more than two decimals."""
    number = _real(0, 100.001)(value)
    if number is None:
        return None
    share = round(number * 100)
    return share if math.isclose(share, number * 100, abs_tol=1e-9) else None


def _step(value: Any) -> RolloutStep | None:
    found = _STEP.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    share, least_ns = _share(float(found["percent"])), _nanoseconds(found["duration"])
    if not share or least_ns is None:
        return None
    return RolloutStep(0, share, least_ns) if found["shadow"] else RolloutStep(share, 0, least_ns)


def _nanoseconds(value: Any) -> int | None:
    if not isinstance(value, str) or _DURATION.fullmatch(value) is None:
        return None
    ns = sum(int(count) * _UNITS_NS[unit] for count, unit in _AMOUNT.findall(value))
    return ns if ns <= _LONGEST_NS else None


def _label(value: Any) -> str | None:
    return value if isinstance(value, str) and is_label(value) else None


def _non_empty_list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) and 0 < len(value) <= _MOST_STEPS else None


def _on_inconclusive(value: Any) -> OnInconclusive | None:
    return next((each for each in OnInconclusive if each.value == value), None)


def _override(value: Any) -> bool | None:
    return {"any": True, "none": False}.get(value) if isinstance(value, str) else None


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _rollout_fields(rollout: Rollout) -> dict[str, Any]:
    """The fields of a rollout, without those that have no effect."""
    fields: dict[str, Any] = {
        "sticky": list(rollout.sticky),
        "match": list(rollout.match),
        "override": "any" if rollout.override else "none",
    }
    if rollout.group:
        fields["group"] = rollout.group
    if rollout.split:
        return fields | {"split": {str(version): share / 100 for version, share in rollout.split}}
    guard, shadow = rollout.guard, rollout.shadow
    limits = {key: getattr(guard, key) for key in ("errors", "slower", "p99_ms", "mismatch")}
    given = {key: limit for key, limit in limits.items() if limit is not None}
    fields |= {
        "candidate": rollout.candidate,
        "steps": list(map(str, rollout.steps)),
        "keep": duration(rollout.keep_ns),
        "on_inconclusive": rollout.on_inconclusive.value,
    }
    if given:
        fields["guard"] = {"requests": guard.requests, "failures": guard.failures, **given}
    if any(step.shadow for step in rollout.steps):
        compare = shadow.compare
        fields["shadow"] = {
            "inflight": shadow.inflight,
            "copy_regions": shadow.copy_regions,
            "compare": {
                "atol": compare.atol,
                "rtol": compare.rtol,
                "ignore": list(compare.ignore),
                "top1": list(compare.top1),
                "topk": dict(compare.topk),
            },
        }
    return fields
