"""`Settings`: all resolved settings, typed, with where each value came from.

`SETTINGS` lists every definition. Sources by precedence: flag, environment variable, file, platform,
default; a repeatable setting takes all its values from one source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from conch.cli.settings.model_settings import ModelControlSettings, ModelLoadSettings, RepositorySettings
from conch.cli.settings.platform_settings import (
    AzureMlSettings,
    PlatformSettings,
    SageMakerSettings,
    VertexAiSettings,
)
from conch.cli.settings.port_settings import (
    AccessSettings,
    ConsoleSettings,
    ControlPortSettings,
    GrpcKeepAliveSettings,
    GrpcSettings,
    GrpcTlsSettings,
    HttpSettings,
    HttpTlsSettings,
)
from conch.cli.settings.server_settings import (
    UNSUPPORTED,
    AccessLogSettings,
    CacheSettings,
    LogSettings,
    MetricsSettings,
    RateLimitSettings,
    ServerSettings,
    TraceSettings,
)
from conch.cli.settings.setting import Setting, SettingGroup


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from, such as `Source("environment", "CONCH_GRPC_PORT")`."""

    kind: Literal["flag", "environment", "file", "keyword", "platform", "default"]
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kind


DEFAULT = Source("default")


class Settings(
    RepositorySettings,
    ModelControlSettings,
    ModelLoadSettings,
    ServerSettings,
    CacheSettings,
    RateLimitSettings,
    GrpcSettings,
    GrpcTlsSettings,
    GrpcKeepAliveSettings,
    HttpSettings,
    HttpTlsSettings,
    AccessSettings,
    ControlPortSettings,
    ConsoleSettings,
    LogSettings,
    AccessLogSettings,
    TraceSettings,
    MetricsSettings,
    PlatformSettings,
    SageMakerSettings,
    VertexAiSettings,
    AzureMlSettings,
):
    """The resolved settings: an attribute each, such as `settings.grpc_port`.

    Attributes:
        values: All values by key, those of unsupported settings included.
        warnings: Problems that are no errors, such as environment variables that look misspelt.
        notes: What operators should know, such as the platform.
    """

    def __init__(
        self,
        given: Mapping[str, tuple[Any, Source]],
        warnings: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self._sources = {key: source for key, (_, source) in given.items()}
        self.values = DEFAULTS | {key: value for key, (value, _) in given.items()}
        self.warnings = warnings
        self.notes = notes

    def __getitem__(self, name: str) -> Any:
        return self.values[name.replace("-", "_")]

    def chosen(self, name: str) -> bool:
        """Whether a setting has a value other than a default, and is not off."""
        return bool(self[name]) and self.source(BY_KEY[name.replace("-", "_")]).kind != DEFAULT.kind

    def source(self, definition: Setting[Any]) -> Source:
        """Where the value of a setting came from."""
        return self._sources.get(definition.key, DEFAULT)


GROUPS: tuple[type[SettingGroup], ...] = Settings.__bases__


def settings_of(group: type[SettingGroup]) -> tuple[Setting[Any], ...]:
    """The definitions of a group, in order."""
    return tuple(each for each in vars(group).values() if isinstance(each, Setting))


SETTINGS: tuple[Setting[Any], ...] = (
    *(each for group in GROUPS for each in settings_of(group)),
    *UNSUPPORTED,
)
BY_KEY = {each.key: each for each in SETTINGS}
DEFAULTS: dict[str, Any] = {each.key: each.default for each in SETTINGS}
