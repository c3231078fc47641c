"""One declaration for each setting, at the field of the options dataclass that takes its value.

`option` declares the field::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class GrpcOptions:
        GROUP: ClassVar = "gRPC"
        port: int = option("--grpc-port", ANY_PORT, 8001, "port for gRPC; 0 for any free one")

From it follow the flag, the environment variable, the TOML key, the keyword of `conch.Server`, the help and
docs/settings.md. `Settings` holds the values that a command line, the environment, a file and keywords give,
and `Settings.build` fills a dataclass with them. `conch.server_options` lists the dataclasses.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, TypeVar

from conch.core.errors import InvalidArgumentError
from conch.settings.value_types import BOOL, NoEffectError, ValueType

T = TypeVar("T")

VARIABLE_PREFIX = "CONCH_"
HIDDEN = "***"
"""Printed in place of a secret."""
SECRET_OPTION = re.compile(r"(?i).*?(password|secret|token|credential|key)[^=]*=")
"""An option such as ``redis,password=``; the rest is hidden."""

_SETTING, _NESTED = "setting", "nested"


class FlagError(Exception):
    """A flag, an environment variable, a file or a keyword is wrong; the text says where and how."""


@dataclass(frozen=True, eq=False)
class Setting(Generic[T]):
    """One setting.

    Attributes:
        flag: The flag, such as ``--grpc-port``.
        kind: Type of one value, with its parser.
        default: Value if nothing gives one.
        help: Text for people, without type, unit, choices and default.
        unit: Unit of the value, such as ``seconds``; empty for none.
        choices: The values allowed, in any case; None for any.
        repeatable: True if it takes several values.
        scope: ``server``, or ``process`` for what `conch.Server` leaves to the program around it.
        replaced_by: Name of the setting to use instead of this deprecated one.
        secret: Pattern of the part of a secret value to show; the rest is hidden. None if nothing is secret.
        unsupported: Reason for which this Triton flag has no effect in conch; empty if it has one. Its
            choices are accepted in silence; other values raise NoEffectError.
        listed: True if help and docs show it.
        group: Heading in the help; empty for that of its dataclass.
        alias: A deprecated setting with the same meaning; its value counts too.
        convert: Makes the field's value; it may raise ValueError, whose text gets the flag in front, or
            InvalidArgumentError or FlagError, whose text names the flag.
    """

    flag: str
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
    group: str = ""
    alias: Setting[Any] | None = None
    convert: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        """The name with dashes, as in its flag."""
        return self.flag.removeprefix("--")

    @property
    def key(self) -> str:
        """TOML key and keyword, with underscores."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable, such as ``CONCH_GRPC_PORT``."""
        return VARIABLE_PREFIX + self.key.upper()

    @property
    def is_switch(self) -> bool:
        """True if the flag may be given without a value, which means true."""
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
        """A resolved value for people, with secrets hidden; several have semicolons between them."""
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


def option(
    flag: str,
    kind: ValueType[Any],
    default: Any = None,
    help: str = "",
    *,
    optional: bool = False,
    alias: str = "",
    **more: Any,
) -> Any:
    """Declares a field of an options dataclass, and its setting.

    Args:
        flag: The flag, such as ``--grpc-port``.
        kind: Type of one value.
        default: The default of field and setting, before `Setting.convert`.
        help: Text for people, without type, unit, choices and default.
        optional: True if only the field has the default, and the setting has none. With
            ``route: str = option("--route", TEXT, "", optional=True)``, if none is given,
            ``settings["route"]`` is None, help and docs show no default, and the field is ``""``.
        alias: Flag of a deprecated setting with the same meaning.
        more: Other attributes of `Setting`.
    """
    repeatable = more.get("repeatable", False)
    if repeatable and default is None:
        default = []
    other: Setting[Any] | None = None
    if alias:
        replaced = flag.removeprefix("--")
        common = {"repeatable": repeatable, "secret": more.get("secret")}
        other = Setting(alias, kind, [] if repeatable else None, replaced_by=replaced, **common)
    declared = Setting(flag, kind, None if optional else default, help, alias=other, **more)
    if declared.convert is None and not repeatable:
        return field(default=default, metadata={_SETTING: declared})
    return field(default_factory=lambda: _converted(declared, default), metadata={_SETTING: declared})


def nested(cls: type[Any]) -> Any:
    """Declares a field that is an options dataclass itself."""
    return field(default_factory=cls, metadata={_NESTED: cls})


def settings_of(cls: type[Any]) -> Iterable[Setting[Any]]:
    """The settings of an options dataclass: its `SWITCH`, which turns its part on, and its fields."""
    switch: Setting[Any] | None = getattr(cls, "SWITCH", None)
    declared = [] if switch is None else [switch]
    for each in fields(cls):
        if _NESTED in each.metadata:
            declared += settings_of(each.metadata[_NESTED])
        elif _SETTING in each.metadata:
            declared.append(each.metadata[_SETTING])
    for one in declared:
        group = one.group or cls.GROUP
        yield replace(one, group=group)
        if one.alias is not None:
            yield replace(one.alias, group=group)


def _converted(setting: Setting[Any], value: Any) -> Any:
    if setting.convert is None or value is None:
        return tuple(value) if setting.repeatable else value
    try:
        return setting.convert(value)
    except ValueError as error:
        raise FlagError(f"{setting.flag}: {error}") from None
    except InvalidArgumentError as error:
        raise FlagError(error.message) from None


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a value, such as `Source("environment", "CONCH_GRPC_PORT")`."""

    kind: Literal["flag", "environment", "file", "keyword", "platform", "default"]
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kind


DEFAULT = Source("default")


class Settings:
    """The resolved settings: ``settings["grpc-port"]`` or ``settings["grpc_port"]``.

    Args:
        definitions: All settings there are.
        given: Values and their sources by key.
        warnings: Problems that are no errors, such as environment variables that look misspelt.
        notes: Facts for operators, such as the platform.

    Attributes:
        values: All values by key, those of unsupported settings included.
    """

    def __init__(
        self,
        definitions: Iterable[Setting[Any]],
        given: Mapping[str, tuple[Any, Source]],
        warnings: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.definitions = tuple(definitions)
        self._sources = {key: source for key, (_, source) in given.items()}
        defaults = {each.key: each.default for each in self.definitions}
        self.values: dict[str, Any] = defaults | {key: value for key, (value, _) in given.items()}
        self.warnings = warnings
        self.notes = notes

    def __getitem__(self, name: str) -> Any:
        return self.values[name.replace("-", "_")]

    def chosen(self, name: str) -> bool:
        """True if a setting is given and is not off; a value equal to the default counts as given."""
        return bool(self[name]) and self.source(name).kind != DEFAULT.kind

    def source(self, name: str) -> Source:
        """Source of a setting's value."""
        return self._sources.get(name.replace("-", "_"), DEFAULT)

    def build(self, cls: type[T], **more: Any) -> T:
        """Fills an options dataclass with the values of its settings; `more` has fields that are none.

        Raises:
            FlagError: A value can't be converted.
        """
        given = dict(more)
        for each in fields(cls):  # type: ignore[arg-type]
            if _NESTED in each.metadata:
                given[each.name] = self.build(each.metadata[_NESTED])
            elif _SETTING in each.metadata:
                value = self._value(each.metadata[_SETTING])
                if value is not None:
                    given[each.name] = value
        return cls(**given)

    def _value(self, setting: Setting[Any]) -> Any:
        value = self[setting.name]
        if setting.alias is not None and (other := self[setting.alias.name]) is not None:
            value = [*value, *other] if setting.repeatable else value or other
        return _converted(setting, value)

    def is_on(self, cls: type[Any]) -> bool:
        """True if the `SWITCH` of an options dataclass is on."""
        return bool(self[cls.SWITCH.name])


def flag_of(options: Any, name: str) -> str:
    """The flag of a field."""
    return setting_of(options, name).flag


def setting_of(options: Any, name: str) -> Setting[Any]:
    """The setting of a field."""
    (found,) = (each for each in fields(options) if each.name == name)
    declared: Setting[Any] = found.metadata[_SETTING]
    return declared
