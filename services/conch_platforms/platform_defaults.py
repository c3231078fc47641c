"""Collects the defaults of a platform, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONFIG = "config.pbtxt"


class Disk:
    """The disk of this machine."""

    def exists(self, path: str) -> bool:
        """True if there is a file, a directory or a link, also a dangling one."""
        return os.path.lexists(path)

    def leads_nowhere(self, path: str) -> bool:
        """True if the path is a dangling link."""
        return os.path.islink(path) and not os.path.exists(path)

    def entries(self, path: str) -> Mapping[str, bool]:
        """Names in a directory, and whether each is a directory; empty if it can't be read."""
        try:
            with os.scandir(path) as found:
                return {each.name: each.is_dir() for each in found if not each.name.startswith(".")}
        except OSError:
            return {}


def is_model(path: str, disk: Disk) -> bool:
    """True if a directory is that of one model: it has a config or versions."""
    entries = disk.entries(path).items()
    return any(name == _CONFIG or (directory and name.isdigit()) for name, directory in entries)


@dataclass(frozen=True, slots=True)
class PlatformDefault:
    """The default of a setting, as texts, with its reason: a variable, a directory or a rule."""

    texts: tuple[str, ...]
    reason: str


class PlatformDefaults:
    """Collects the defaults of one platform.

    Attributes:
        found: Defaults by key.
    """

    def __init__(self, environment: Mapping[str, str], given: Mapping[str, Any], disk: Disk) -> None:
        self.environment = environment
        self.given = given
        self.disk = disk
        self.found: dict[str, PlatformDefault] = {}

    def set(self, key: str, text: str, reason: str) -> None:
        """Sets a default; a repository only where none is given, in any way."""
        if key == "model_repository" and self.repositories:
            return
        self.found[key] = PlatformDefault((text,), reason)

    def close(self, *protocols: str, reason: str = "one port for all requests") -> None:
        """Closes the ports of protocols, unless a port is given for one."""
        for protocol in protocols:
            if f"{protocol}_port" not in self.given:
                self.set(f"allow_{protocol}", "false", reason)

    def variable(self, key: str, variable: str) -> bool:
        """Sets a default from a variable; returns whether that is set."""
        text = self.environment.get(variable, "")
        if text:
            self.set(key, text, variable)
        return bool(text)

    def value(self, key: str) -> Any:
        """Value of a setting, or its text: given, or the platform's default; None without either."""
        if key in self.given:
            return self.given[key]
        default = self.found.get(key)
        return None if default is None else default.texts[0]

    @property
    def repositories(self) -> list[str]:
        """The model repositories that are given."""
        return [
            str(each) for key in ("model_repository", "model_store") for each in self.given.get(key) or ()
        ]
