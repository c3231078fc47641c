"""A model's files as rollouts see them: its declaration, and a digest for each version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from conch.core.errors import InvalidArgumentError
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
from conch_control.repository.source import Declared, Labelled, ModelSource
from conch_rollout.rollout_calls import OWN_LABELS
from conch_rollout.rollout_file import Declaration, parse_json, parse_toml

_CANDIDATES = ("candidate", "challenger")
"""Labels of repositories whose version is the candidate, the first that there is."""


@dataclass
class VersionDigests:
    """Files of a model, with the digests of its versions."""

    state: Fingerprint
    _known: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Fingerprint) -> VersionDigests:
        """Digests of a repository's fingerprint, without files that are not loaded."""
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


def read_declaration(source: ModelSource, state: Fingerprint) -> tuple[Mapping[str, int], Declaration]:
    """Labels of a model's repository, and the declaration of its file or repository.

    Labels alone are none: the registry follows them as it publishes versions, so that no request meets a
    label whose old version has gone.

    Raises:
        InvalidArgumentError: The declaration is wrong.
        OSError: It can't be read.
    """
    if has_rollout(state):
        place = f"{source.location}/{ROLLOUT_FILE}"
        try:
            text = source.read(ROLLOUT_FILE).decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"{place} is not UTF-8; write it as text") from None
        return {}, parse_toml(text, place)
    model = unwrapped(source)
    if not isinstance(model, Labelled):
        return {}, Declaration()
    labels = {label: version for label, version in model.labels().items() if label not in OWN_LABELS}
    tag = model.rollout_declaration() if isinstance(model, Declared) else None
    if tag is None:
        return labels, Declaration()
    place = f"the rollout declared with {source.location}"
    declared = (parse_json if tag.lstrip().startswith("{") else parse_toml)(tag, place)
    if declared.labels:
        raise InvalidArgumentError(f"{place}: labels: they are those of the repository; remove the table")
    rollout = declared.rollout
    if rollout is not None and not rollout.split:
        candidate = next((model.labels()[each] for each in _CANDIDATES if each in model.labels()), None)
        rollout = None if candidate is None else replace(rollout, candidate=candidate)
    return labels, Declaration() if rollout is None else Declaration(labels, rollout)
