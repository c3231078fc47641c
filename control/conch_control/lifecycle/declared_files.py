"""A model's files as rollouts see them: its declaration, and a digest for each version."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from conch.core.errors import InvalidArgumentError
from conch_control.canary.rollout_file import Declaration, parse_toml
from conch_control.repository.layout import (
    ROLLOUT_FILE,
    Fingerprint,
    has_rollout,
    of_all_versions,
    of_configs,
    of_version,
    split_markers,
    versions_in,
    without_rollout,
)
from conch_control.repository.namespaces import unwrapped
from conch_control.repository.source import Labelled, ModelSource


@dataclass
class VersionDigests:
    """Files of a model, with the digests of its versions."""

    state: Fingerprint
    _known: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Fingerprint) -> VersionDigests:
        """Of a repository's fingerprint, without what is not loaded."""
        return cls(without_rollout(split_markers(state)[0]))

    @property
    def versions(self) -> Sequence[int]:
        """Versions that have files."""
        return versions_in(self.state)

    def digest(self, version: int) -> str:
        """Digest of all that a version is loaded from."""
        found = self._known.get(version)
        if found is None:
            state = self.state
            found = _digest((of_configs(state), of_all_versions(state), of_version(state, version)))
            self._known[version] = found
        return found

    @property
    def name(self) -> str:
        """Digest of all files."""
        return _digest(self.state)


def _digest(state: object) -> str:
    return hashlib.blake2b(repr(state).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def read_declaration(source: ModelSource, state: Fingerprint) -> Declaration:
    """What a model's `ROLLOUT_FILE` and its source declare.

    Raises:
        InvalidArgumentError: The file is wrong.
        OSError: It can't be read.
    """
    declaration = Declaration()
    if has_rollout(state):
        place = f"{source.location}/{ROLLOUT_FILE}"
        try:
            text = source.read(ROLLOUT_FILE).decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"{place} is not UTF-8; write it as text") from None
        declaration = parse_toml(text, place)
    named = unwrapped(source)
    if isinstance(named, Labelled):
        declaration = Declaration({**named.labels(), **declaration.labels}, declaration.rollout)
    return declaration
