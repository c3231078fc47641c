"""Registered models and versions, as MLflow's REST API writes them; which versions are served. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conch.core.version_text import LABEL_PATTERN, STABLE

READY = "READY"
PENDING = "PENDING_REGISTRATION"
SERVE_TAG = "conch.serve"
"""Tag of a version that is served without an alias, with the value ``true``."""
NAME_TAG = "conch.name"
"""Tag of a registered model with the name that it is served under."""
FLAVOR_TAG = "conch.flavor"
"""Tag of a version, or of all by their model, with the flavor to serve."""
ROLLOUT_TAG = "conch.rollout"
"""Tag of a registered model with a declaration of its rollout."""

_CHAMPION = "champion"
_PRODUCTION = "Production"
_MOST_VERSION = 2**63 - 1


class MalformedError(OSError):
    """An answer is not what MLflow's API documents."""


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A model version.

    Attributes:
        created: Creation, in milliseconds.
        source: URI of what was registered, such as ``models:/m-<id>``.
        stage: The deprecated stage, ``None`` for none.
    """

    number: int
    created: int
    source: str
    status: str
    stage: str = "None"
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Changes with the version's content; another version of the same number has another one."""
        return f"{self.created} {self.source}"


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A registered model.

    Attributes:
        stamp: Creation and last change; a change of aliases is none.
        latest: The newest version of each stage.
    """

    name: str
    stamp: tuple[int, int]
    latest: tuple[RegisteredVersion, ...] = ()
    aliases: Mapping[str, int] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def known(self) -> dict[int, RegisteredVersion]:
        """The versions that the listing describes, by number."""
        return {each.number: each for each in self.latest}

    def in_production(self) -> RegisteredVersion | None:
        """The newest version in the deprecated stage Production that is ready."""
        return newest_ready(each for each in self.latest if each.stage == _PRODUCTION)

    def labels(self, followed: Mapping[str, int], served: Collection[int], stable: str) -> dict[str, int]:
        """Labels of served versions: the aliases, ``production`` for that stage, and ``stable``.

        Args:
            followed: Versions that are served for aliases.
            served: Numbers of all served versions.
            stable: The alias whose version is stable; empty for ``stable`` or else ``champion``.
        """
        aliases = {**self.aliases, **followed}
        staged = self.in_production()
        named = ({_PRODUCTION.lower(): staged.number} if staged else {}) | aliases
        first = stable or (STABLE if STABLE in aliases else _CHAMPION)
        if first in named:
            named[STABLE] = named[first]
        else:
            named.pop(STABLE, None)
        return {alias: number for alias, number in named.items() if number in served}


def can_be_label(alias: str) -> bool:
    """True if a request can give an alias as a version."""
    return re.fullmatch(LABEL_PATTERN, alias) is not None


def wanted_aliases(model: RegisteredModel, chosen: tuple[str, ...]) -> dict[str, int]:
    """The aliases whose versions are served."""
    if not chosen:
        return dict(model.aliases)
    return {alias: model.aliases[alias] for alias in chosen if alias in model.aliases}


def newest_ready(versions: Iterable[RegisteredVersion]) -> RegisteredVersion | None:
    """The newest version that can be served."""
    return max(
        (each for each in versions if each.status == READY), key=lambda each: each.number, default=None
    )


def parse_model(data: Any) -> RegisteredModel:
    """Reads a registered model. Raises MalformedError: it is none."""
    try:
        return RegisteredModel(
            str(data["name"]),
            (int(data.get("creation_timestamp", 0)), int(data.get("last_updated_timestamp", 0))),
            tuple(map(parse_version, data.get("latest_versions", ()))),
            {str(each["alias"]): _number(each["version"]) for each in data.get("aliases", ())},
            _tags(data),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed("registered model", error) from None


def parse_version(data: Any) -> RegisteredVersion:
    """Reads a model version. Raises MalformedError: it is none."""
    try:
        return RegisteredVersion(
            _number(data["version"]),
            int(data.get("creation_timestamp", 0)),
            str(data.get("source", "")),
            str(data.get("status", READY)),
            str(data.get("current_stage", "None")),
            _tags(data),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed("model version", error) from None


def quoted(text: str) -> str:
    """A text in a filter; empty if the filter's language can't write it."""
    for quote in ("'", '"'):
        if quote not in text:
            return f"{quote}{text}{quote}"
    return ""


def _number(text: Any) -> int:
    number = int(text)
    if not 0 < number <= _MOST_VERSION:
        raise ValueError(f"{number} is no version")
    return number


def _tags(data: Any) -> dict[str, str]:
    return {str(each["key"]): str(each.get("value", "")) for each in data.get("tags", ())}


def _malformed(what: str, error: Exception) -> MalformedError:
    return MalformedError(
        f"it answers with a {what} that MLflow does not write: {type(error).__name__}: {error}"
    )
