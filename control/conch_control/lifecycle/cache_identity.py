"""Which loads of a model may share cached responses, and the way behind the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from conch.core.errors import ConchError
from conch.core.registry import Registry
from conch.core.response_cache.service import CacheService
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch_control.repository.layout import fingerprint

log = logging.getLogger(__name__)


def load_identity(cache: CacheService | None, spec: ModelSpec) -> bytes:
    """What a load has in common with those that give the same answers, for `put_behind`.

    A cache of this process alone: nothing, so that a reload asks the model again. One that is shared: its
    files and its config, of whatever server and whenever it was loaded.
    """
    if cache is None or not (spec.cached and cache.shared):
        return os.urandom(16)
    return content_digest(spec)


class PartsIdentity:
    """Tells the answers of an ensemble apart by the loads of its models that gave them.

    Shared with nobody, whatever the cache: other servers can't know which loads these are.

    Args:
        spec: The ensemble.
        registry: Where its models are.
    """

    def __init__(self, spec: ModelSpec, registry: Registry) -> None:
        self._spec = spec
        self._registry = registry
        self._known: tuple[list[object], bytes | None] = [], b""

    def __call__(self) -> bytes:
        """What stays the same until one of the models is replaced; never, once one has sequences."""
        try:
            parts = list(all_parts(self._spec, self._registry))
        except ConchError:
            return os.urandom(16)  # a model is missing, and nothing kept must hide that
        loads: list[object] = [part.statistics for part in parts]
        seen, identity = self._known
        if loads != seen:  # counters have no equality of their own, and each load has new ones
            # What sequences answer depends on what came before.
            stateful = any(part.spec.sequence is not None for part in parts)
            identity = None if stateful else os.urandom(16)
            self._known = loads, identity
        return os.urandom(16) if identity is None else identity


def all_parts(spec: ModelSpec, registry: Registry) -> Iterator[Servable]:
    """The models that an ensemble is made of now, and what those are made of that are ensembles.

    Args:
        spec: The ensemble.
        registry: Where its models are.

    Raises:
        ConchError: One of them is missing.
    """
    seen: set[tuple[str, int]] = set()
    unseen = [spec]
    while unseen:
        ensemble = unseen.pop().ensemble
        for step in () if ensemble is None else ensemble.steps:
            if (step.model_name, step.model_version) in seen:
                continue
            seen.add((step.model_name, step.model_version))
            version = "" if step.model_version < 0 else str(step.model_version)
            model = registry.resolve(step.model_name, version)
            yield model
            unseen.append(model.spec)


def put_behind(cache: CacheService | None, model: Servable, identity: bytes | PartsIdentity) -> Servable:
    """A loaded model, behind the cache if it wants one.

    Args:
        cache: The server's cache, if it has one.
        model: The model.
        identity: Its `load_identity` from before it was loaded, or that of its parts.
    """
    spec = model.spec
    if not spec.cached:
        return model
    if cache is None:
        log.warning(
            "model '%s' enables the response cache, but the server has none (--cache-config): its responses "
            "are not cached",
            spec.name,
        )
        return model
    if cache.shared and isinstance(identity, bytes) and load_identity(cache, spec) != identity:
        log.warning(
            "the files of model '%s' version %d changed while it was loaded: its cached responses are "
            "not shared",
            spec.name,
            spec.version,
        )
        identity = os.urandom(16)
    return cache.wrap(model, identity)


def content_digest(spec: ModelSpec) -> bytes:
    """A digest of what decides what a model version answers: config, backend options and files.

    The files of other versions are left out. What a model reads from outside its directory is not known.
    """
    config = json.dumps(spec.config, sort_keys=True)  # the message's bytes need not be the same every time
    digest = hashlib.sha256(repr((config, sorted(spec.backend_options.items()))).encode())
    for path, size, _, _ in fingerprint(spec.directory):
        top = path.partition("/")[0]
        if path.endswith("/") or (top.isdigit() and top != str(spec.version)):
            continue
        digest.update(repr((path, size, _file_digest(spec.directory / path))).encode())
    return digest.digest()


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return os.urandom(16)  # nobody can say what it holds
