"""The interfaces of model repositories, local or remote."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from conch.core.errors import ConchError
from conch_control.repository.layout import Fingerprint, is_incomplete, split_markers

Progress = Callable[[int, int], None]
"""Called from any thread with the bytes done and the total."""


class Staged(Protocol):
    """A model's files in a local directory, unchanged until released."""

    @property
    def directory(self) -> Path:
        """The model's directory, with config and versions."""

    @property
    def fingerprint(self) -> Fingerprint:
        """State of the source in the directory."""

    def release(self) -> None:
        """Ends the use of the directory."""


class ModelSource(Protocol):
    """A model in a repository. Cheap to create; holds no resources."""

    @property
    def name(self) -> str:
        """Model name."""

    @property
    def location(self) -> str:
        """Path or URL, for logs."""

    def fingerprint(self) -> Fingerprint:
        """Current state of the model's files; equal only if no file has changed.

        Raises:
            OSError: The storage does not answer.
        """

    def read(self, path: str) -> bytes:
        """Contents of a small file, by path in the model's directory.

        Raises:
            FileNotFoundError: There is none.
            OSError: It can't be read now.
        """

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> Staged:
        """Makes the model's files local.

        Args:
            progress: Receives the progress.
            cancelled: Returns True to give up; polled.

        Raises:
            OSError: The files can't be fetched; only data that helps a retry is kept.
            CancelledError: `cancelled` returned True.
        """


@runtime_checkable
class Listed(Protocol):
    """A model whose state was part of the listing that found it."""

    def listed_fingerprint(self) -> Fingerprint:
        """State at the listing; does not access storage."""


@runtime_checkable
class Renamed(Protocol):
    """A model whose name its repository gives, so that its config may have another one."""

    @property
    def renamed(self) -> bool:
        """True."""


@runtime_checkable
class DataOnly(Protocol):
    """A model of a repository that others may write to, whose files and config have to be data."""

    @property
    def data_only(self) -> str:
        """Reason and remedy, as the end of an error text; empty if the model may be code after all."""

    @property
    def checked_backends(self) -> Collection[str]:
        """Backends whose files may be code, and for which the repository has checked them and its config."""


@runtime_checkable
class Labelled(Protocol):
    """A model whose repository names versions, as MLflow's aliases do.

    Labels are no part of the fingerprint: moving one changes no file.
    """

    def labels(self) -> Mapping[str, int]:
        """Versions by label, at the listing; only versions that the model has."""


@runtime_checkable
class Declared(Protocol):
    """A `Labelled` model whose repository can declare its rollout, as a tag in MLflow does.

    The declaration is no part of the fingerprint.
    """

    def rollout_declaration(self) -> str | None:
        """The text of a declaration in TOML or JSON, at the listing; None for none."""


@runtime_checkable
class SelfManaged(Protocol):
    """A repository that loads its own changes and needs no watching."""

    self_managed: bool


class Repository(Protocol):
    """A place with models."""

    @property
    def location(self) -> str:
        """Path or URL."""

    def check(self) -> None:
        """Checks at the start that it is usable.

        Raises:
            InvalidArgumentError: It is no repository, or its settings are wrong.
        """

    def models(self) -> Mapping[str, ModelSource]:
        """Lists its models by name. Raises OSError: the storage does not answer."""

    def close(self) -> None:
        """Closes connections and drops staged files."""


DUPLICATE = "model appears in two or more repositories"
"""Reason for which a model of `Scan.duplicates` can't be loaded."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The models of all repositories at one moment.

    Attributes:
        models: Models with a unique name; with namespaces all models, by identifier.
        duplicates: Names in several repositories; empty with namespaces.
        unreadable: Unreadable repositories with the reason; if any, the absence of a model means nothing.
        late: Those of them that have not answered yet.
        remembered: Models of the late ones at their last listing.
        age_ns: Age of the oldest listing when the scan began.
        identifiers: Identifiers by model name, with namespaces.
    """

    models: Mapping[str, ModelSource]
    duplicates: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    remembered: Mapping[str, ModelSource] = field(default_factory=dict)
    age_ns: int = 0
    identifiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def source(self, name: str) -> ModelSource | None:
        """A model, of a late repository as at its last listing."""
        return self.models.get(name, self.remembered.get(name))

    def identified(self, name: str) -> tuple[str, ...]:
        """Identifiers for a name or identifier; several only with namespaces."""
        return (name,) if name in self.models else self.identifiers.get(name, (name,))


def without_incomplete(names: Iterable[str], scan: Scan) -> list[str]:
    """The models that are not marked as incomplete."""
    return [name for name in names if name not in scan.models or not _marked(scan.models[name])]


def _marked(source: ModelSource) -> bool:
    try:
        return is_incomplete(split_markers(source.fingerprint())[1])
    except (ConchError, OSError):
        return False  # the load reports the error
