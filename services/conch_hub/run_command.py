"""`conch run`: serves a language model on this machine, and opens a chat with it."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import signal
import stat
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from conch.cli.command_parser import CommandParser
from conch_hub.pull_command import DONE, INTERRUPTED, REFUSED, USAGE, add_source_flags, headers_of

if TYPE_CHECKING:
    from conch_api.embedded_server import Server
    from conch_hub.pull import Wanted

_MOST_PROMPT = 4 << 20


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="conch run",
        description="Serves a GGUF file, a folder, or a model that it fetches first as conch pull does, and "
        "opens a chat in the terminal. Elsewhere it answers one prompt, the argument and standard input, as "
        "plain text.",
        epilog="exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted",
    )
    parser.add_argument("model", help="a file, a folder, or a source of conch pull")
    parser.add_argument("prompt", nargs="?", help="answer this, and end")
    parser.add_argument("--web", action="store_true", help="open the chat page of the console instead")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--temperature", type=_number, metavar="T", help="0 for the likeliest answer (the model's)"
    )
    parser.add_argument("--max-tokens", type=_count, metavar="N", help="most tokens of an answer (no limit)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes answers repeat")
    parser.add_argument(
        "--context",
        type=_count,
        default=0,
        metavar="N",
        help="most tokens of all turns (the model's, at most 8192)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port of OpenAI's routes on 127.0.0.1 (any free one)",
    )
    add_source_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)  # a prompt may come after flags
    if options.web and options.prompt is not None:
        parser.error("--web opens a page, which takes no PROMPT")
    chosen = (options.system or None, options.temperature, options.max_tokens, options.seed)
    if options.web and any(each is not None for each in chosen):
        parser.error("--system, --temperature, --max-tokens and --seed have no effect on the page of --web")
    # They import the server, which the help can do without.
    from conch_hub.model_server import ServeSettings, serving
    from conch_hub.pull import Wanted
    from conch_hub.safe_text import safe
    from conch_hub.source import PullError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have what the terminal's encoding has not
    wanted = Wanted(
        options.model,
        options.revision,
        options.file,
        options.sha256.lower(),
        headers_of(options.header, parser),
        options.allow_http,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    try:
        prompt = options.prompt if options.web or _is_terminal() else _whole_prompt(options)
        path, name, pattern = _local(wanted)
        settings = ServeSettings(options.context, options.port, options.web)
        _say(f"loading {name} …")
        with serving(path, name, settings, pattern) as server:
            if options.web:
                return _open_page(server)
            return _talk(server, name, prompt, options)
    except BrokenPipeError:
        raise  # the reader of the answer has gone, which needs no words
    except (PullError, OSError) as error:
        print(f"conch run: {safe(str(error))}", file=sys.stderr)
        return REFUSED
    except _UsageError as error:
        print(f"conch run: {error}", file=sys.stderr)
        return USAGE


class _UsageError(Exception):
    pass


def _end(number: int, _: object) -> NoReturn:
    """Ends the process with its server; a chat takes an interrupt as the end of an answer."""
    sys.exit(128 + number)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _is_fed() -> bool:
    """True if standard input is a pipe or a file: of others the end may never come."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _whole_prompt(options: argparse.Namespace) -> str:
    """The argument, and behind it all of standard input, if that is a pipe or a file."""
    data = b"" if options.prompt is None else options.prompt.encode(errors="surrogateescape")
    if options.prompt is None or _is_fed():
        read = sys.stdin.buffer.read(_MOST_PROMPT + 1)
        data = data + b"\n\n" + read if data and read.strip() else data or read
    if len(data) > _MOST_PROMPT:
        raise _UsageError(f"the prompt has more than {_MOST_PROMPT} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _UsageError("the prompt is no text in UTF-8") from None
    if not text.strip():
        raise _UsageError("there is no prompt: give it as an argument or on standard input")
    return text


def _local(wanted: Wanted) -> tuple[Path, str, str]:
    """The model's file or folder, its name, and the pattern of its file; it is fetched if it is elsewhere."""
    from conch_hub.model_server import check_engine
    from conch_hub.pull import Reporter, pull
    from conch_hub.source import PullError
    from conch_hub.version_folder import VersionFolder

    path = Path(wanted.source)
    if path.exists():
        if wanted.revision or wanted.sha256 or wanted.headers:
            raise _UsageError("--revision, --sha256 and -H have no effect on a file of this machine")
        stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.resolve().name)
        name = re.sub(r"[^A-Za-z0-9._+-]+", "-", stem).lstrip(".-_+")[:128] or "model"
        return _newest_version(path), name, wanted.pattern
    if path.suffix == ".gguf" and "://" not in wanted.source:
        raise PullError(f"there is no file '{path}'")
    key = json.dumps([wanted.source, wanted.revision, wanted.pattern, wanted.sha256])
    name = f"{wanted.name[:100]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    place = cache_directory(os.environ) / name / "1"
    if place.is_dir():
        _say(f"as fetched before to {place}; remove {place.parent} to fetch it again")
    else:
        reporter = Reporter()
        try:
            with VersionFolder(place.parents[1], name) as folder:
                pull(wanted, folder, reporter, check_engine)
        finally:
            reporter.clear()
    return place, wanted.name, ""


def _newest_version(path: Path) -> Path:
    """The newest version directory of a model in a repository; other files and folders themselves."""
    versions = [each for each in path.iterdir() if each.name.isdecimal()] if path.is_dir() else []
    return max(versions, key=lambda each: int(each.name), default=path)


def cache_directory(environment: Mapping[str, str]) -> Path:
    """The repository of models that `conch run` has fetched."""
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home(), ".cache")
    return Path(base, "conch", "pulled")


def _open_page(server: Server) -> int:
    url = f"{server.console_url}/#/chat"
    print(url)
    _say("Ctrl-C ends")
    webbrowser.open(url)
    try:
        server.wait()
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _talk(server: Server, name: str, prompt: str | None, options: argparse.Namespace) -> int:
    from conch_hub.chat.chat_terminal import ChatTerminal
    from conch_hub.chat.conversation import ChatError, Conversation
    from conch_hub.safe_text import safe

    fields = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
    sampling: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    assert server.http_port is not None
    chat = Conversation("127.0.0.1", server.http_port, name, sampling)
    chat.begin(options.system)
    if prompt is None:
        print(f"{name}, with OpenAI's routes on http://127.0.0.1:{server.http_port}/v1")
        ChatTerminal(chat).run()
        return DONE
    is_terminal = sys.stdout.isatty()
    try:
        with closing(chat.ask(prompt)) as pieces:
            for piece in pieces:
                sys.stdout.write(safe(piece.text, "\n\t") if is_terminal else piece.text)
                sys.stdout.flush()
    except ChatError as error:
        print(f"conch run: {safe(str(error))}", file=sys.stderr)
        return REFUSED
    print()
    if chat.figures.finish == "length":
        _say("the answer is cut: the context or --max-tokens is full")
    return DONE


def _say(text: str) -> None:
    """Says a sentence to people: on standard error, if that is a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _count(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got '{text}'")
    return int(text)


def _port(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"expected a port up to 65535, got '{text}'")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got '{text}'")
    return value
