"""Connection flags of commands that use a server's control port, and texts for their failures."""

from __future__ import annotations

import argparse
import re
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from conch.core.errors import ConchError, InvalidArgumentError, error_text
from conch_control.remote_api.connection_options import (
    DEFAULT_ADDRESS,
    DEFAULT_PORT,
    ClientTls,
    ConnectionOptions,
    read_token,
)
from conch_control.remote_api.messages import UnreachableError

OK = 0
FAILED = 1
"""The server refused or failed."""
USAGE = 2
UNREACHABLE = 3
"""No server, or one that speaks another protocol."""
INTERRUPTED = 130

TARGET_VARIABLE = "CONCH_CONTROL_TARGET"
TOKEN_VARIABLE = "CONCH_CONTROL_TOKEN_FILE"

_TARGET_FLAGS = ("--target", "--server", "--address")
_DEFAULT_TARGET = f"{DEFAULT_ADDRESS}:{DEFAULT_PORT}"
_TARGET = re.compile(r"unix:.+|(\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+):[0-9]{1,5}")


class UsageError(Exception):
    """The command line can't work; the text says why."""


def add_connection_flags(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Adds the flags for the address, TLS and token of a server, or of several."""
    group = parser.add_argument_group("connection")
    default = f"(default: {TARGET_VARIABLE}, or {DEFAULT_ADDRESS}:{DEFAULT_PORT})"
    if several:
        group.add_argument(
            *_TARGET_FLAGS,
            action="append",
            metavar="HOST:PORT",
            help=f"control port of a server, or unix:PATH; may be repeated, in {TARGET_VARIABLE} with ';' "
            f"between {default}",
        )
    else:
        group.add_argument(
            *_TARGET_FLAGS, metavar="HOST:PORT", help=f"control port of the server, or unix:PATH {default}"
        )
    group.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"file with the token (default: {TOKEN_VARIABLE})"
    )
    group.add_argument("--use-ssl", action="store_true", help="speak TLS; the flags below imply it")
    group.add_argument(
        "--root-cert",
        type=Path,
        metavar="FILE",
        help="PEM file of the root certificates for the server (default: the system's)",
    )
    group.add_argument("--client-cert", type=Path, metavar="FILE", help="PEM file of our certificate")
    group.add_argument("--client-key", type=Path, metavar="FILE", help="PEM file of our key")
    group.add_argument("--server-name", metavar="NAME", help="name that the server's certificate must have")


def server_targets(values: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """The addresses from flags and environment of a command for several servers.

    Raises:
        UsageError: One is none, or given twice.
    """
    texts = values.target or (environment.get(TARGET_VARIABLE) or _DEFAULT_TARGET).split(";")
    where = "--target" if values.target else TARGET_VARIABLE
    for number, text in enumerate(texts):
        _check_target(text, where)
        if text in texts[:number]:
            raise UsageError(f"{where}: '{text}' is given twice")
    return list(texts)


def _check_target(text: str, where: str) -> None:
    if not _TARGET.fullmatch(text):
        raise UsageError(f"{where}: '{text}' is neither HOST:PORT nor unix:PATH")


def connection_options(values: argparse.Namespace, environment: Mapping[str, str]) -> ConnectionOptions:
    """The connection options from flags and environment.

    Raises:
        UsageError: Flags contradict each other, or a file can't be read.
    """
    target = values.target or environment.get(TARGET_VARIABLE) or _DEFAULT_TARGET
    _check_target(target, "--target" if values.target else TARGET_VARIABLE)
    token_file = values.token_file
    if token_file is None and environment.get(TOKEN_VARIABLE):
        token_file = Path(environment[TOKEN_VARIABLE])
    return ConnectionOptions(target, _tls(values), None if token_file is None else _token(token_file))


def _tls(values: argparse.Namespace) -> ClientTls | None:
    given = (values.root_cert, values.client_cert, values.client_key, values.server_name)
    if not values.use_ssl and not any(given):
        return None
    if (values.client_cert is None) != (values.client_key is None):
        raise UsageError("--client-cert and --client-key must be given together")
    return ClientTls(
        root=_pem(values.root_cert, "--root-cert"),
        private_key=_pem(values.client_key, "--client-key"),
        certificate=_pem(values.client_cert, "--client-cert"),
        server_name=values.server_name,
    )


def _pem(path: Path | None, flag: str) -> bytes | None:
    return None if path is None else read_file(path, flag)


def _token(path: Path) -> str:
    try:
        return read_token(read_file(path, "--token-file").decode(errors="replace"))
    except InvalidArgumentError as error:
        raise UsageError(f"--token-file: {path}: {error.message}") from None


def read_file(path: Path, flag: str) -> bytes:
    """The contents of a file that a flag names. Raises UsageError: it can't be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag}: {path} can't be read: {error.strerror}") from None


def failure(error: ConchError, options: ConnectionOptions) -> tuple[int, str]:
    """Exit code and text for an error."""
    if not isinstance(error, UnreachableError):
        return FAILED, error_text(error)
    return UNREACHABLE, f"{error.message}{_hint(error.message, options)}"


def _hint(text: str, options: ConnectionOptions) -> str:
    tls = options.tls
    if "refused" in text or "No such file" in text:
        return "\nIs the server running, with --control-port?"
    if tls is None:
        if "closed" in text or "reset" in text or "Broken pipe" in text or "preface" in text:
            return "\nThe server may want TLS: --use-ssl, --root-cert"
        return ""
    if "WRONG_VERSION_NUMBER" in text:
        return "\nThe server seems not to speak TLS: leave --use-ssl and the certificates out"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "\nThe server's certificate is not signed by any in --root-cert"
    if "peer name" in text.lower() or "hostname" in text.lower():
        return "\nThe server's certificate is for another name: --server-name"
    if "closed" in text or "reset" in text or "CERTIFICATE_REQUIRED" in text or "Broken pipe" in text:
        if tls.certificate is None:
            return "\nThe server may ask for a certificate: --client-cert, --client-key"
        return "\nThe server may not accept the certificate in --client-cert"
    return ""


_GIVE_UP_S = 2.0


def interruptibly(action: Callable[[], None], give_up: Callable[[], None]) -> None:
    """Runs an action on another thread, so that no interrupt comes while gRPC holds a lock.

    Raises the action's error. After a KeyboardInterrupt `give_up` makes the action end.
    """
    errors: list[BaseException] = []
    done = threading.Event()

    def act() -> None:
        try:
            action()
        except BaseException as error:  # boundary: the action; the waiting thread raises its error
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=act, name="conch-control-call", daemon=True)
    thread.start()
    try:
        done.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second interrupt ends at once
        give_up()
        thread.join(_GIVE_UP_S)  # misses a call that begins at this moment
        raise
    thread.join()
    if errors:
        raise errors.pop()
