"""What the front ends answer alike, before each puts it into its protocol's form."""

from __future__ import annotations

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.registry import Entry, parse_version
from conch.core.servable import Servable
from conch.core.server_core import ServerCore
from conch.core.spec import ModelSpec


def ready_versions(entry: Entry) -> list[int]:
    """The versions that take requests, ascending."""
    return sorted(entry.ready)


def served_versions(core: ServerCore, name: str, version: str) -> tuple[ModelSpec, list[int]]:
    """A model, and the versions that its metadata names: all that are ready, or the one asked for.

    Raises:
        ConchError: It is not served; see `Registry.resolve`.
    """
    spec = core.model(name, version).spec
    return spec, [spec.version] if version else ready_versions(core.registry.find(name)[1])


def platform(spec: ModelSpec) -> str:
    """What a model's metadata says it runs on."""
    return spec.platform or spec.backend


def counted_models(core: ServerCore, name: str, version: str) -> list[Servable]:
    """The model versions whose statistics are asked for, by name, then version; all of them without a name.

    Raises:
        InvalidArgumentError: There is no such model or version; the texts are Triton's.
        UnavailableError: The server could not start.
    """
    core.check_started()
    registry = core.registry
    entries = registry.entries
    number = parse_version(version)
    names = registry.identifiers(name) if name else sorted(entries)
    if name and not names:
        raise InvalidArgumentError(f"requested model '{name}' is not available")
    models = [
        entries[each].ready[ready]
        for each in names
        for ready in ready_versions(entries[each])
        if number in (-1, ready)
    ]
    if name and not models:
        raise InvalidArgumentError(f"requested model version is not available for model '{name}'")
    return models


def refuse_repository_name(name: str) -> None:
    """Raises UnsupportedError for a request that says which repository it means."""
    if name:
        raise UnsupportedError("'repository_name' specification is not supported")
