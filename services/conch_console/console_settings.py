"""Builds the console's options from the resolved settings. Used by: `server_options`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from conch.cli.settings.all_settings import SETTINGS, Settings
from conch.cli.settings.setting import FlagError
from conch.core.errors import InvalidArgumentError
from conch.frontends.http.http_server import HttpTls
from conch.process.option_files import contents_of, refuse_without
from conch_console.console_options import ConsoleOptions, ConsoleTokens, ShownFlag, read_tokens

_TLS_FILES = ("console-server-cert", "console-server-key", "console-root-cert")


def console_options(settings: Settings) -> ConsoleOptions | None:
    """The options of the console; None without one.

    Raises:
        FlagError: A setting is malformed, names a file that can't be read, or contradicts others.
    """
    if not settings.console_port:
        switches = ("console-use-ssl", "console-token-file", "console-allow-control", "console-allow-infer")
        for name in (*switches, *_TLS_FILES, "console-host"):
            if settings.chosen(name):
                raise FlagError(f"--{name} needs --console-port")
        return None
    options = ConsoleOptions(
        address=settings.console_address,
        port=settings.console_port,
        hosts=tuple(settings.console_host),
        tokens=_tokens(settings),
        policy=settings.access_policy is not None,
        tls=_tls(settings),
        allow_control=settings.console_allow_control,
        allow_infer=settings.console_allow_infer,
        max_input_bytes=settings.http_max_input_size,
        flags=tuple(
            ShownFlag(each.name, each.text(settings[each.name]), str(settings.source(each)))
            for each in SETTINGS
            if each.listed
        ),
    )
    if options.address.startswith("unix:"):
        raise FlagError("--console-address: browsers can't open a Unix socket; give a host")
    try:
        options.check()
    except InvalidArgumentError as error:
        raise FlagError(f"--console-address: {error.message}") from None
    if options.tokens is not None and not options.tokens.admin:
        for name in ("console-allow-control", "console-allow-infer"):
            if settings.chosen(name):
                raise FlagError(f"--{name} is for admins: --console-token-file has no line 'admin: TOKEN'")
    return options


def _tokens(settings: Settings) -> ConsoleTokens | None:
    path = settings.console_token_file
    if path is None:
        return None
    if settings.access_policy is not None:
        raise FlagError(
            "--console-token-file: with --access-policy users log in with its keys and tokens; leave it out"
        )
    try:
        return read_tokens(contents_of(settings, "console-token-file", "").decode(errors="replace"))
    except InvalidArgumentError as error:
        raise FlagError(f"--console-token-file: {path}: {error.message}") from None


def _tls(settings: Settings) -> HttpTls | None:
    if not settings.console_use_ssl:
        refuse_without(settings, "console-use-ssl", _TLS_FILES)
        return None
    for name in _TLS_FILES:
        if name != "console-root-cert" or settings[name] is not None:
            contents_of(settings, name, "the console")  # TLS reads it by its path
    return HttpTls(
        cast("Path", settings.console_server_cert),
        cast("Path", settings.console_server_key),
        settings.console_root_cert,
    )
