"""Resolves settings from the command line, the environment, a TOML file, the platform and keywords."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from conch.server_options import Detected
from conch.server_settings import ADD_ONS, SETTINGS
from conch.settings.option import VARIABLE_PREFIX, FlagError, Setting, Settings, Source
from conch.settings.shared_tls import port_settings
from conch.settings.value_types import MOST_PORT, NoEffectError

_OTHER_VARIABLES = ("CONCH_CONTROL_TARGET", "CONCH_CONTROL_TOKEN_FILE")
"""Variables of commands other than ``serve``."""
_SIMILARITY = 0.8
"""Similarity from which an unknown variable counts as a misspelt one, from 0 to 1."""
_PROTOCOLS = {"HTTP": "http", "GRPC": "grpc", "metrics": "metrics"}
"""Protocols with a port: name in Triton's texts, and prefix of the settings."""

_KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""A variable that Kubernetes sets in each container."""
_CONNECTION_AGE_MS = 30 * 60 * 1000

BY_KEY = {each.key: each for each in SETTINGS}
"""All settings by key."""

_Given = dict[str, tuple[Any, Source]]

_WITHOUT_EFFECT = object()
"""Stands for a flag's value that has no effect."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def read_flags(
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    as_triton: bool = False,
    defaults: Mapping[str, Sequence[str]] | None = None,
) -> Settings:
    """Resolves a command line, the environment, the file that one of them names, and the platform.

    A flag may be shortened to an unambiguous prefix.

    Args:
        arguments: The command line without the command.
        environment: The environment variables.
        as_triton: True if a flag of Triton without effect is a warning, and no error.
        defaults: The defaults of `conch demo` by key, as texts.

    Raises:
        FlagError: A name is unknown, or a value is wrong.
    """
    ignored: list[str] | None = [] if as_triton else None
    from_flags = {
        key: (value, Source("flag", BY_KEY[key].flag))
        for key, value in _parsed_flags(arguments, ignored).items()
    }
    from_environment = _from_environment(environment)
    file = (from_flags.get("config_file") or from_environment.get("config_file") or (None,))[0]
    given = _from_additional_flags(environment, ignored) | _from_file(file) | from_environment | from_flags
    own = {
        key: (_parsed(BY_KEY[key], texts, key), Source("default", "conch demo"))
        for key, texts in (defaults or {}).items()
        if key in BY_KEY  # an add-on need not be there
    }
    named = {key: value for key, (value, _) in (own | given).items()}
    detected = [each.detect(environment, named) for each in ADD_ONS.values()]
    from_platform: _Given = {}
    for each in detected:
        from_platform |= _from_platform(each)
    settings = Settings(
        SETTINGS,
        _with_shared_tls(_from_kubernetes(environment) | from_platform | own | given),
        (
            *(ignored or ()),
            *_misspelt(environment),
            *(warning for each in detected for warning in each.warnings),
            *_closed_ports(from_platform, given),
        ),
        tuple(note for each in detected for note in each.notes),
    )
    _check_ports(settings)
    return settings


def read_keywords(keywords: Mapping[str, Any]) -> Settings:
    """Resolves keyword arguments of `conch.Server`, such as ``http_port=0``; ignores the environment.

    Values are texts as on the command line, or what they stand for; None leaves a setting out. A repeatable
    setting takes one value or a list.

    Raises:
        FlagError: A name is unknown, or a value is wrong.
    """
    given: _Given = {}
    for name, value in keywords.items():
        definition = BY_KEY.get(name)
        if definition is None:
            raise FlagError(f"there is no option '{name}'{did_you_mean(name, BY_KEY)}")
        if value is None:
            continue
        several = isinstance(value, list | tuple)
        if several and not definition.repeatable:
            raise FlagError(f"{name}: takes one value, not {len(value)} of them")
        texts = map(str, value if several else [value])
        given[name] = (_parsed(definition, texts, name), Source("keyword", name))
    settings = Settings(SETTINGS, _with_shared_tls(_from_file(given.get("config_file", (None,))[0]) | given))
    _check_ports(settings)
    return settings


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    settings: Iterable[Setting[Any]],
    ignored: list[str] | None = None,
) -> None:
    """Adds flags to a parser, without defaults: a parsed value is one that was given.

    With a list `ignored`, values without effect are `_WITHOUT_EFFECT`, and the list gets warnings of them.
    """
    for each in settings:
        default = f" (default: {each.default_text})" if each.default_text else ""
        text = f"{each.description}{default}".replace("%", "%%")  # argparse formats it
        more: dict[str, Any] = {
            "dest": each.key,
            "type": each.parse if ignored is None else _tolerant(each, ignored),
            "default": argparse.SUPPRESS,
            "help": text if each.listed else argparse.SUPPRESS,
            "metavar": each.metavar,
        }
        if each.repeatable:
            more["action"] = "append"
        if each.is_switch:
            more |= {"nargs": "?", "const": "true"}
        parser.add_argument(each.flag, **more)


def _tolerant(definition: Setting[Any], ignored: list[str]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return definition.parse(text)
        except NoEffectError as error:
            ignored.append(f"{definition.flag}={text} has no effect: {error.reason}")
            return _WITHOUT_EFFECT

    return parse


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error text about an unknown name; empty if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _parsed_flags(arguments: Sequence[str], ignored: list[str] | None) -> dict[str, Any]:
    if not arguments:  # the parser takes longer to make than all else here
        return {}
    parser = _Parser(prog="conch serve", add_help=False)
    add_flags(parser, SETTINGS, ignored)
    known, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        flags = [each.flag for each in SETTINGS if each.listed]
        hint = did_you_mean(unknown[0].partition("=")[0], flags)
        raise FlagError(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return {
        key: value
        for key, value in vars(known).items()
        if value is not _WITHOUT_EFFECT and (not isinstance(value, list) or _WITHOUT_EFFECT not in value)
    }


def _from_additional_flags(environment: Mapping[str, str], ignored: list[str] | None) -> _Given:
    """The flags in an add-on's variable, such as Triton's for SageMaker."""
    given: _Given = {}
    for variable in filter(None, (each.FLAGS_VARIABLE for each in ADD_ONS.values())):
        try:
            flags = _parsed_flags(shlex.split(environment.get(variable, "")), ignored)
        except (FlagError, ValueError) as error:
            raise FlagError(f"environment variable {variable}: {error}") from None
        given |= {key: (value, Source("environment", variable)) for key, value in flags.items()}
    return given


def _from_platform(detected: Detected) -> _Given:
    given: _Given = {}
    for key, (texts, reason) in detected.defaults.items():
        where = f"{detected.title}: {reason}"
        given[key] = (_parsed(BY_KEY[key], texts, where), Source("platform", where))
    return given


def _closed_ports(from_platform: _Given, given: _Given) -> Iterator[str]:
    """Warnings about ports that are given, and that a variable of the platform closes."""
    for key, (value, source) in from_platform.items():
        port = BY_KEY.get(f"{key.removeprefix('allow_')}_port")
        if value is False and key not in given and port is not None and port.key in given:
            yield f"{port.flag} has no effect, as {source.name} closes the port; {BY_KEY[key].flag} opens it"


def _from_kubernetes(environment: Mapping[str, str]) -> _Given:
    """The defaults that are others where the server runs.

    In Kubernetes connections age: a client's only connection would otherwise stay with one pod for ever.
    """
    if _KUBERNETES not in environment:
        return {}
    return {"grpc_max_connection_age": (_CONNECTION_AGE_MS, Source("platform", f"Kubernetes: {_KUBERNETES}"))}


def _with_shared_tls(given: _Given) -> _Given:
    """The values, with those of ports that follow from the certificate of all ports."""
    defaults = {key: each.default for key, each in BY_KEY.items()}
    follow = port_settings(defaults, {key: value for key, (value, _) in given.items()})
    return {key: (value, Source("default", flag)) for key, (value, flag) in follow.items()} | given


def _from_environment(environment: Mapping[str, str]) -> _Given:
    given: _Given = {}
    for each in SETTINGS:
        text = environment.get(each.variable)
        if text is not None:
            texts = text.split(";") if each.repeatable else [text]
            value = _parsed(each, texts, f"environment variable {each.variable}")
            given[each.key] = (value, Source("environment", each.variable))
    return given


def _from_file(path: Path | None) -> _Given:
    if path is None:
        return {}
    import tomllib

    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise FlagError(f"config file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlagError(f"config file {path} is not TOML: {error}") from None
    given: _Given = {}
    for name, value in content.items():
        definition = BY_KEY.get(name.replace("-", "_"))
        if definition is None:
            known = [each.name for each in SETTINGS]
            raise FlagError(f"config file {path}: unknown option '{name}'{did_you_mean(name, known)}")
        texts = map(str, value if isinstance(value, list) else [value])
        parsed = _parsed(definition, texts, f"config file {path}: {name}")
        given[definition.key] = (parsed, Source("file", f"{path}:{name}"))
    return given


def _parsed(definition: Setting[Any], texts: Iterable[str], where: str) -> Any:
    """The value of texts: a list for a repeatable setting, else the first one's."""
    try:
        values = [definition.parse(text) for text in texts]
    except argparse.ArgumentTypeError as error:
        raise FlagError(f"{where}: {error}") from None
    if definition.repeatable:
        return values
    if not values:
        raise FlagError(f"{where}: takes one value, not 0 of them")
    return values[0]


def _misspelt(environment: Mapping[str, str]) -> Iterator[str]:
    """Warnings about variables similar to known ones.

    They are no errors: Kubernetes makes variables from names of services, such as CONCH_SERVICE_PORT.
    """
    known = [*(each.variable for each in SETTINGS), *_OTHER_VARIABLES]
    names = [name.removeprefix(VARIABLE_PREFIX) for name in known]
    for variable in sorted(environment):
        if not variable.startswith(VARIABLE_PREFIX) or variable in known:
            continue
        near = difflib.get_close_matches(
            variable.removeprefix(VARIABLE_PREFIX), names, n=1, cutoff=_SIMILARITY
        )
        if near:
            yield (
                f"environment variable {variable} is unknown and has no effect; did you mean "
                f"'{VARIABLE_PREFIX}{near[0]}'?"
            )


def _check_ports(settings: Settings) -> None:
    """Checks the ports of enabled protocols; like Triton, it ignores the others."""
    for add_on in ADD_ONS.values():
        settings.build(add_on).check(settings)
    protocols = _PROTOCOLS | {name: key for each in ADD_ONS.values() for name, key in each.PROTOCOLS.items()}
    taken: dict[tuple[str, int], str] = {}
    for protocol, prefix in protocols.items():
        if not settings[f"allow_{prefix}"]:
            continue
        port = settings[f"{prefix}_port"]
        if not 0 <= port <= MOST_PORT:
            raise FlagError(f"{BY_KEY[f'{prefix}_port'].flag}: must be from 0 to {MOST_PORT}, got {port}")
        address = settings.values.get(f"{prefix}_address") or settings["http-address"]
        if address.startswith("unix:") or not port:  # any free port
            continue
        other = taken.setdefault((address, port), protocol)
        if other != protocol:
            raise FlagError(
                f"The server cannot listen to {other} requests and {protocol} requests at the same address "
                f"and port {address}:{port}"
            )
