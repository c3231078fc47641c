"""Where models come from: what every kind of repository offers, local or remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from conch_control.repository.layout import Fingerprint

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are there; from any thread."""


class Staged(Protocol):
    """A model's files in a local directory, which stay as they are until they are released."""

    @property
    def directory(self) -> Path:
        """The model's directory: config, version directories and all."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The state of the source that is in the directory."""

    def release(self) -> None:
        """Says that nothing of the model is served from the directory any more."""


class ModelSource(Protocol):
    """One model of one repository. Cheap to make; it holds nothing open."""

    @property
    def name(self) -> str:
        """Model name."""

    @property
    def location(self) -> str:
        """Where it is, for people: a path or a URL."""

    def fingerprint(self) -> Fingerprint:
        """The state of the model's files now; equal only if no file has changed.

        Raises:
            OSError: The storage can't say now.
        """

    def read(self, path: str) -> bytes:
        """The contents of a small file, by its path inside the model's directory.

        Raises:
            FileNotFoundError: There is none.
            OSError: It can't be read now.
        """

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> Staged:
        """Brings the model's files into a local directory, where they are not in one already.

        Args:
            progress: Is told how far it is.
            cancelled: Asked now and then whether to give up.

        Raises:
            OSError: The files can't be had; nothing is left behind that does not help the next try.
            CancelledError: It was told to give up.
        """


@runtime_checkable
class Listed(Protocol):
    """A model whose state was in the listing that has found it."""

    def listed_fingerprint(self) -> Fingerprint:
        """The state then, however long ago that was; the storage is not asked."""


@runtime_checkable
class SelfManaged(Protocol):
    """A repository that nobody needs to watch: whoever changes it has what follows from that loaded.

    Attributes:
        announced: That it is one.
    """

    self_managed: bool


class Repository(Protocol):
    """A place with models."""

    @property
    def location(self) -> str:
        """Where it is, for people: a path or a URL."""

    def check(self) -> None:
        """Checks at the start that it can be used.

        Raises:
            InvalidArgumentError: It is not a repository, or its settings are wrong.
        """

    def models(self) -> Mapping[str, ModelSource]:
        """The models it has now, by name.

        Raises:
            OSError: The storage can't say now.
        """

    def close(self) -> None:
        """Gives up connections and staged files; nothing may be served from them any more."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The models found at one moment in all repositories.

    Attributes:
        models: Each model whose name is unique; all of them, by identifier, where models have namespaces.
        duplicates: Names that more than one repository has; none where models have namespaces.
        unreadable: Repositories that could not say what they have, with the reason: that a model is missing
            from the scan says nothing while there are any.
        late: Those of them that have just not answered so far.
        remembered: The models that the late ones had when they answered last.
        age_ns: How long before the scan the oldest of the listings began that it is made of.
        identifiers: Identifiers of models by name, where models have namespaces.
    """

    models: Mapping[str, ModelSource]
    duplicates: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    remembered: Mapping[str, ModelSource] = field(default_factory=dict)
    age_ns: int = 0
    identifiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def identified(self, name: str) -> tuple[str, ...]:
        """The models that a name, or an identifier, stands for: several only where models have namespaces."""
        return (name,) if name in self.models else self.identifiers.get(name, (name,))
