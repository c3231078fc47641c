"""Namespaces: models of the same name in several repositories (``--model-namespacing``).

A model has an *identifier*, ``<repository>::<name>``, everywhere but in client-visible texts. An
ensemble's step names a model of its own repository, else the only one of that name elsewhere. The resolved
identifiers are part of an ensemble's fingerprint, so that a change of resolution is a change of the
ensemble. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.spec import identifier
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Listed, ModelSource, Progress, Scan, Staged

_PARTS = "::parts"  # no file can have this path

ReadComposingModels = Callable[[ModelSource], tuple[str, ...]]
"""Reads the identifiers of an ensemble's composing models; empty for other models."""


@dataclass(frozen=True, slots=True)
class Names:
    """Identifiers by model name."""

    identifiers: Mapping[str, tuple[str, ...]]

    def resolve(self, name: str, own: str, wanted: str = "") -> str:
        """Identifier for a step's model name, in namespace `wanted` or `own`; the bare name if ambiguous."""
        known = self.identifiers.get(name, ())
        if wanted:
            return identifier(wanted, name)
        if identifier(own, name) in known:
            return identifier(own, name)
        return known[0] if len(known) == 1 else name


@dataclass(frozen=True, slots=True)
class Namespaced:
    """A model under its identifier; a `ModelSource`."""

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
        """Path or URL, for logs."""
        return self.source.location

    def identify(self, config: ModelConfig) -> tuple[str, ...]:
        """Identifiers of an ensemble's composing models, in the order of the steps."""
        return tuple(
            self.names.resolve(step.model_name, self.namespace, step.model_namespace)
            for step in config.ensemble_scheduling.step
        )

    def fingerprint(self) -> Fingerprint:
        """State of the model's files and resolved composing models.

        Raises:
            OSError: The storage does not answer.
        """
        return self._with_parts(self.source.fingerprint())

    def listed_fingerprint(self) -> Fingerprint:
        """As `fingerprint`, from the listing where possible; see `Listed`.

        Raises:
            OSError: The storage does not answer.
        """
        source = self.source
        state = source.listed_fingerprint() if isinstance(source, Listed) else source.fingerprint()
        return self._with_parts(state)

    def read(self, path: str) -> bytes:
        """Contents of a small file, by path in the model's directory."""
        return self.source.read(path)

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> Staged:
        """Makes the model's files local."""
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


def unwrapped(source: ModelSource) -> ModelSource:
    """The model as its repository has it."""
    return source.source if isinstance(source, Namespaced) else source


def namespace_of(source: ModelSource) -> str:
    """Namespace of a model; empty without namespaces."""
    return source.namespace if isinstance(source, Namespaced) else ""


def namespaced(
    found: Mapping[str, Mapping[str, ModelSource]],
    known: Mapping[str, tuple[str, ...]],
    read_composing_models: ReadComposingModels,
) -> Scan:
    """Builds a scan of models under their identifiers."""
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
