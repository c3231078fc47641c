"""Which loads of a model may share cached responses, and the way behind the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from conch.core.cache.service import CacheService
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


def put_behind(cache: CacheService | None, model: Servable, identity: bytes) -> Servable:
    """A loaded model, behind the cache if it wants one.

    Args:
        cache: The server's cache, if it has one.
        model: The model.
        identity: Its `load_identity` from before it was loaded.
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
    if cache.shared and load_identity(cache, spec) != identity:
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
