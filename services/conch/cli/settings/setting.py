"""`Setting`: the definition of one setting, and a typed attribute of the resolved settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload

from conch.cli.settings.value_types import BOOL, NoEffectError, ValueType

T = TypeVar("T")

VARIABLE_PREFIX = "CONCH_"
HIDDEN = "***"
"""Printed in place of a secret."""


class FlagError(Exception):
    """A flag, an environment variable, a file or a keyword is wrong; the text says where and how."""


class SettingGroup:
    """Settings with one heading in the help; `values` holds the resolved values by key."""

    title = ""
    values: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Setting(Generic[T]):
    """One setting. As a class attribute of a `SettingGroup` it yields the resolved value.

    Attributes:
        kind: Type of one value, with its parser.
        default: Value if nothing gives one.
        help: Text for people, without type, unit, choices and default.
        unit: Unit of the value, such as ``seconds``; empty for none.
        choices: The values allowed, in any case; None for any.
        repeatable: Whether it takes several values.
        scope: ``server``, or ``process`` for what `conch.Server` leaves to the program around it.
        replaced_by: Name of the setting to use instead of this deprecated one.
        secret: Pattern of what may be shown of a secret value; the rest is hidden. None if nothing is secret.
        unsupported: Why conch ignores this Triton flag; its choices are the values without effect.
        listed: Whether help and docs show it.
        key: Attribute, TOML key and keyword, with underscores; the attribute's name where it has one.
        group: Heading in the help.
    """

    kind: ValueType[Any]
    default: T
    help: str = ""
    unit: str = ""
    choices: tuple[str, ...] | None = None
    repeatable: bool = False
    scope: Literal["server", "process"] = "server"
    replaced_by: str = ""
    secret: re.Pattern[str] | None = None
    unsupported: str = ""
    listed: bool = True
    key: str = ""
    group: str = field(default="", init=False)

    def __set_name__(self, owner: type[SettingGroup], name: str) -> None:
        object.__setattr__(self, "key", name)
        object.__setattr__(self, "group", owner.title)

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...

    @overload
    def __get__(self, instance: SettingGroup, owner: type) -> T: ...

    def __get__(self, instance: SettingGroup | None, owner: type) -> Setting[T] | T:
        if instance is None:
            return self
        value: T = instance.values[self.key]
        return value

    @property
    def name(self) -> str:
        """The name with dashes, as in its flag."""
        return self.key.replace("_", "-")

    @property
    def flag(self) -> str:
        """The flag, such as ``--grpc-port``."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable, such as ``CONCH_GRPC_PORT``."""
        return VARIABLE_PREFIX + self.key.upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag may be given without a value, which means true."""
        return self.kind is BOOL

    @property
    def metavar(self) -> str:
        """The value in a usage text: choices, unit or type."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        return (self.unit or self.kind.name).upper()

    @property
    def description(self) -> str:
        """The help text with deprecation and repetition."""
        if self.replaced_by:
            return f"deprecated: use --{self.replaced_by}"
        return f"{self.help}; may be repeated" if self.repeatable else self.help

    @property
    def default_text(self) -> str:
        """The default for people; empty for none."""
        return self.text(self.default)

    def text(self, value: Any) -> str:
        """A resolved value for people, as the command line takes it, with secrets hidden."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return ";".join(map(self.text, value))
        return str(value).removesuffix(".0") if isinstance(value, float) else self.public(str(value))

    def public(self, text: str) -> str:
        """A text with its secret part hidden."""
        if self.secret is None or (shown := self.secret.match(text)) is None:
            return text
        return shown[0] + HIDDEN

    def parse(self, text: str) -> Any:
        """The value of a text. Raises argparse.ArgumentTypeError: the setting does not take it."""
        if self.choices is None:
            return self.kind.parse(text)
        choice = {choice.lower(): choice for choice in self.choices}.get(text.strip().lower())
        if choice is not None:
            return choice
        if self.unsupported:
            instead = f" or give {self.choices[0]}" if self.choices else ""
            raise NoEffectError(
                self.unsupported, f"'{text}' has no effect: {self.unsupported}; leave it out{instead}"
            )
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(self.choices)}, got {text}")


def setting(kind: ValueType[T], default: T, help: str, **more: Any) -> Setting[T]:
    """A setting that always has a value."""
    return Setting(kind, default, help, **more)


def optional(kind: ValueType[T], help: str = "", **more: Any) -> Setting[T | None]:
    """A setting without a default."""
    return Setting(kind, None, help, **more)


def repeatable(kind: ValueType[T], help: str = "", **more: Any) -> Setting[list[T]]:
    """A setting with a list of values."""
    return Setting(kind, [], help, repeatable=True, **more)
