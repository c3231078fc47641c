"""Reads placement files (TOML): the servers of a fleet, and rules for where models go.

Unknown keys and wrong values are refused with file and field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_fleet.placement import EVERYWHERE, UNITS

_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")
_CONNECTION = ("token_file", "root_cert", "client_cert", "client_key", "server_name")
_SERVER = ("address", "labels", "memory", *_CONNECTION)
_PLACES = ("replicas", "labels", "memory")
_RULE = ("name", *_PLACES, "residency")


@dataclass(frozen=True, slots=True)
class FleetServer:
    """A server of the fleet.

    Attributes:
        address: ``HOST:PORT`` of its control port, or ``unix:PATH``.
        memory: Bytes for models; None if unlimited.
        connection: Connection flags of its own, such as ``token_file``; relative paths start at the file.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = None
    connection: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for models whose name matches a pattern, as in a shell: ``resnet*``.

    Attributes:
        replicas: Number of servers; `EVERYWHERE` for all that are allowed.
        labels: Labels that a server must have.
        memory: Bytes on each server; None to go by what servers report.
        residency: Servers load the models for their requests, and conch control loads them nowhere.
    """

    pattern: str
    replicas: int | None = EVERYWHERE
    labels: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = None
    residency: bool = False


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """Servers and rules; the first rule that matches a model holds, and without one it goes everywhere."""

    servers: tuple[FleetServer, ...] = ()
    rules: tuple[Rule, ...] = ()

    def rule_of(self, model: str) -> Rule:
        """The rule for a model; with namespaces patterns match the name behind the repository, too."""
        names = {model, model.rpartition("::")[2]}
        matching = (rule for rule in self.rules if any(fnmatchcase(name, rule.pattern) for name in names))
        return next(matching, _DEFAULT)

    def loads(self, model: str) -> bool:
        """False for a model that servers load for its requests."""
        return not self.rule_of(model).residency


_DEFAULT = Rule("*")


def read_placement(path: Path) -> PlacementRules:
    """Reads a placement file.

    Raises:
        InvalidArgumentError: It can't be read, or says something wrong; the text names the field.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is not TOML: {error}") from None
    try:
        _check_keys(content, ("server", "model"), "")
        servers = tuple(_server(each, at, path.parent) for each, at in _tables(content, "server"))
        rules = tuple(_rule(each, at) for each, at in _tables(content, "model"))
        _check_unique([server.address for server in servers], "server.address")
        _check_unique([rule.pattern for rule in rules], "model.name")
    except _FieldError as error:
        raise InvalidArgumentError(f"{path}: {error}") from None
    return PlacementRules(servers, rules)


class _FieldError(Exception):
    pass


def _server(table: Mapping[str, Any], at: str, directory: Path) -> FleetServer:
    _check_keys(table, _SERVER, at)
    connection = {key: _text(table, key, at) for key in _CONNECTION if key in table}
    for key in connection.keys() - {"server_name"}:
        connection[key] = str(directory / connection[key])
    return FleetServer(_text(table, "address", at), _labels(table, at), _memory(table, at), connection)


def _rule(table: Mapping[str, Any], at: str) -> Rule:
    _check_keys(table, _RULE, at)
    replicas = table.get("replicas", "everywhere")
    if replicas == "everywhere":
        replicas = EVERYWHERE
    elif isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise _FieldError(f"{at}.replicas: must be a number from 1 or 'everywhere', not {replicas!r}")
    residency = table.get("residency", False)
    if not isinstance(residency, bool):
        raise _FieldError(f"{at}.residency: must be true or false, not {residency!r}")
    for key in _PLACES if residency else ():
        if key in table:
            raise _FieldError(
                f"{at}.{key}: has no effect with residency = true, as servers load these models themselves; "
                f"remove it"
            )
    return Rule(_text(table, "name", at), replicas, _labels(table, at), _memory(table, at), residency)


def _tables(content: Mapping[str, Any], key: str) -> list[tuple[Mapping[str, Any], str]]:
    tables = content.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise _FieldError(f"{key}: must be tables, each begun with [[{key}]]")
    return [(each, f"{key}[{number}]") for number, each in enumerate(tables)]


def _check_keys(table: Mapping[str, Any], known: Sequence[str], at: str) -> None:
    for key in table:
        if key not in known:
            where = f"{at}.{key}" if at else key
            raise _FieldError(f"{where}: unknown field; known are {', '.join(known)}")


def _check_unique(values: Sequence[str], what: str) -> None:
    for number, value in enumerate(values):
        if value in values[:number]:
            raise _FieldError(f"{what}: '{value}' is given twice")


def _text(table: Mapping[str, Any], key: str, at: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise _FieldError(f"{at}.{key}: must be a text" + ("" if key in table else "; it is missing"))
    return value


def _labels(table: Mapping[str, Any], at: str) -> dict[str, str]:
    labels = table.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise _FieldError(f'{at}.labels: must be a table of texts, such as {{ gpu = "true" }}')
    return labels


def _memory(table: Mapping[str, Any], at: str) -> int | None:
    if "memory" not in table:
        return None
    found = _SIZE.fullmatch(table["memory"]) if isinstance(table["memory"], str) else None
    if found is None:
        raise _FieldError(f'{at}.memory: must be a size such as "2GB" or "512MiB", not {table["memory"]!r}')
    return round(float(found[1]) * UNITS[found[2]])
