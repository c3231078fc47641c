"""Identity of cached responses: which loads of a model may share them.

A process-local cache gets a random identity per load, so a reload invalidates. A shared cache gets a digest
of files and config. Ensembles get an identity per combination of their composing models' loads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from conch.core.errors import ConchError
from conch.core.registry import Registry
from conch.core.response_cache.cache_service import CacheService
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch_control.repository.layout import fingerprint, without_rollout

log = logging.getLogger(__name__)


def cache_identity(cache: CacheService | None, spec: ModelSpec) -> bytes:
    """Identity of a load, taken before it: random for a local cache, the content digest for a shared one."""
    if cache is None or not (spec.cached and cache.shared):
        return os.urandom(16)
    return content_digest(spec)


class EnsembleCacheIdentity:
    """Identity of an ensemble's responses, derived from the loads of its composing models.

    Never shared between servers, as it is random.
    """

    def __init__(self, spec: ModelSpec, registry: Registry) -> None:
        self._spec = spec
        self._registry = registry
        self._known: tuple[list[object], bytes | None] = [], b""

    def __call__(self) -> bytes:
        """Constant until a composing model is replaced.

        Always new if one has sequences or a route, or is missing.
        """
        parts: list[Servable] = []
        try:
            for part in all_composing_models(self._spec, self._registry.resolve_early):
                if part is None:
                    return os.urandom(16)  # its version depends on the request
                parts.append(part)
        except ConchError:
            return os.urandom(16)  # a missing model must not be hidden by a cached response
        loads: list[object] = [part.statistics for part in parts]
        seen, identity = self._known
        if loads != seen:  # counters compare by identity and are new for each load
            # Responses of sequences depend on earlier requests.
            stateful = any(part.spec.sequence is not None for part in parts)
            identity = None if stateful else os.urandom(16)
            self._known = loads, identity
        return os.urandom(16) if identity is None else identity


def all_composing_models(
    spec: ModelSpec, resolve: Callable[[str, str], Servable | None]
) -> Iterator[Servable | None]:
    """The composing models of an ensemble, recursively, as a function finds them.

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
            model = resolve(step.model_name, version)
            yield model
            if model is not None:
                unseen.append(model.spec)


def wrap_in_cache(
    cache: CacheService | None, model: Servable, identity: bytes | EnsembleCacheIdentity
) -> Servable:
    """Wraps a loaded model in the response cache if its config asks for it.

    `identity` is that of an ensemble, or `cache_identity` from before the load.
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
    if cache.shared and isinstance(identity, bytes) and cache_identity(cache, spec) != identity:
        log.warning(
            "the files of model '%s' version %d changed while it was loaded: its cached responses are "
            "not shared",
            spec.name,
            spec.version,
        )
        identity = os.urandom(16)
    return cache.wrap(model, identity)


def content_digest(spec: ModelSpec) -> bytes:
    """Digest of the config, the backend options and the files of one version.

    Files of other versions are left out; files outside the model's directory are not covered.
    """
    config = json.dumps(spec.config, sort_keys=True)  # serialised protobuf bytes are not stable
    digest = hashlib.sha256(repr((config, sorted(spec.backend_options.items()))).encode())
    for path, size, _, _ in without_rollout(fingerprint(spec.directory)):
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
        return os.urandom(16)  # unreadable: never equal
