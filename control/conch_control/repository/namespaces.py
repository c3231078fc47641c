"""Models of the same name in several repositories, told apart by where they are.

With ``--model-namespacing`` a model goes by an *identifier*, ``<repository>::<name>``, everywhere but in what
clients see. An ensemble finds what it is made of in its own repository first, then in the only other one that
has it; so what it is made of is part of its state, and a change of that is a change of the ensemble.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.spec import identifier
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Listed, ModelSource, Progress, Scan, Staged

_PARTS = "::parts"  # no file of a model can be called so by a path inside its directory's versions

ReadComposingModels = Callable[[ModelSource], tuple[str, ...]]
"""Identifiers of the models that an ensemble is made of; none for other models."""


@dataclass(frozen=True, slots=True)
class Names:
    """Which identifiers the models of a name have.

    Attributes:
        identifiers: Identifiers by name, in the order of the repositories.
    """

    identifiers: Mapping[str, tuple[str, ...]]

    def resolve(self, name: str, own: str, wanted: str = "") -> str:
        """The identifier of the model that an ensemble means by a name.

        Args:
            name: The name in its config.
            own: Namespace of the ensemble.
            wanted: Namespace in its config, or empty.

        Returns:
            The identifier, or just the name where no model, or none without ambiguity, can be meant.
        """
        known = self.identifiers.get(name, ())
        if wanted:
            return identifier(wanted, name)
        if identifier(own, name) in known:
            return identifier(own, name)
        return known[0] if len(known) == 1 else name


@dataclass(frozen=True, slots=True)
class Namespaced:
    """A model that goes by its identifier; a `ModelSource`.

    Attributes:
        source: The model in its repository.
        namespace: Location of the repository.
        names: What the names in its config may mean.
        read_parts: Reads what it is made of, if it is an ensemble.
    """

    source: ModelSource
    namespace: str
    names: Names
    read_composing_models: ReadComposingModels

    @property
    def name(self) -> str:
        """Identifier of the model."""
        return identifier(self.namespace, self.source.name)

    @property
    def location(self) -> str:
        """Where it is, for people: a path or a URL."""
        return self.source.location

    def identify(self, config: ModelConfig) -> tuple[str, ...]:
        """Identifiers of the models that the steps of an ensemble's config mean, in their order."""
        return tuple(
            self.names.resolve(step.model_name, self.namespace, step.model_namespace)
            for step in config.ensemble_scheduling.step
        )

    def fingerprint(self) -> Fingerprint:
        """The state of the model's files, and of what an ensemble is made of.

        Raises:
            OSError: The storage can't say now.
        """
        return self._with_parts(self.source.fingerprint())

    def listed_fingerprint(self) -> Fingerprint:
        """The same, as far as a listing has said it; see `Listed`.

        Raises:
            OSError: The storage can't say now.
        """
        source = self.source
        state = source.listed_fingerprint() if isinstance(source, Listed) else source.fingerprint()
        return self._with_parts(state)

    def read(self, path: str) -> bytes:
        """The contents of a small file; see `ModelSource.read`."""
        return self.source.read(path)

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> Staged:
        """Brings the model's files into a local directory; see `ModelSource.stage`."""
        staged = self.source.stage(progress, cancelled)
        return _StagedWithParts(staged, self._with_parts(staged.fingerprint))

    def _with_parts(self, state: Fingerprint) -> Fingerprint:
        parts = self.read_composing_models(self)
        return tuple(sorted((*state, (_PARTS, 0, 0, "\n".join(parts))))) if parts else state


@dataclass(frozen=True, slots=True)
class _StagedWithParts:
    staged: Staged
    fingerprint: Fingerprint

    @property
    def directory(self) -> Path:
        return self.staged.directory

    def release(self) -> None:
        self.staged.release()


def in_repository(source: ModelSource) -> ModelSource:
    """A model as its repository has it."""
    return source.source if isinstance(source, Namespaced) else source


def namespace_of(source: ModelSource) -> str:
    """The namespace of a model; empty where there are none."""
    return source.namespace if isinstance(source, Namespaced) else ""


def namespaced(
    found: Mapping[str, Mapping[str, ModelSource]],
    known: Mapping[str, tuple[str, ...]],
    read_composing_models: ReadComposingModels,
) -> Scan:
    """A scan in which all models go by their identifiers.

    Args:
        found: The models of each repository, by its location and their name.
        known: The names of the models of each repository, also of those that can't be read now.
        read_parts: Reads what an ensemble is made of.
    """
    identifiers: dict[str, tuple[str, ...]] = {}
    for location, given in known.items():
        for name in given:
            identifiers[name] = (*identifiers.get(name, ()), identifier(location, name))
    names = Names(identifiers)
    models = {
        identifier(location, name): Namespaced(source, location, names, read_composing_models)
        for location, sources in found.items()
        for name, source in sources.items()
    }
    return Scan(models, identifiers=identifiers)
