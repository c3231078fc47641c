"""Presents settings: help of `conch serve`, output of `conch config`, and the generated files.

`scripts/generate_settings.py` writes those: docs/settings.md and the keyword types of `conch.Server`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from conch.cli.settings.settings_reader import add_flags
from conch.server_settings import GROUPS, SETTINGS
from conch.settings.option import DEFAULT, Setting, Settings

_HELP_COLUMN = 30
_DOCS_HEAD = """\
# Settings

Made by `scripts/generate_settings.py` from the options of each part; do not edit.

Each setting can be given in these ways; the first one that gives it wins:

1. a flag of `conch serve`: `--grpc-port=8001`, or any unambiguous prefix of it
2. an environment variable: `CONCH_GRPC_PORT=8001`; several values are separated by semicolons
3. a key of the TOML file that `--config-file` names: `grpc-port = 8001`; several values are a list
4. the [platform](platforms.md) that conch runs on, which has other defaults, such as its port
5. its default

`conch.Server` takes them as keywords, `grpc_port=8001`, or from the file; it does not read the environment.
`conch config` with the flags of `conch serve` prints each effective value and where it came from.
"""

_LINE = 110
_KEYWORDS_HEAD = '''\
"""Types of the keywords of `conch.Server`. Made by `scripts/generate_settings.py`; do not edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class ServerKeywords(TypedDict, total=False):
    """Keywords of `conch.Server`, described in docs/settings.md; None leaves a setting out."""

'''


def help_parser(program: str, usage: str = "") -> argparse.ArgumentParser:
    """A parser that prints the help of a command with all flags, by group."""

    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.HelpFormatter(prog, max_help_position=_HELP_COLUMN)

    parser = argparse.ArgumentParser(
        prog=program,
        usage=usage or f"{program} --model-repository=LOCATION [flags]",
        description="Flags win over environment variables (--grpc-port: CONCH_GRPC_PORT), and those over "
        "the TOML file that --config-file names (grpc-port = 8001).",
        formatter_class=formatter,
        allow_abbrev=False,
    )
    for title, group in GROUPS.items():
        add_flags(parser.add_argument_group(title), group)
    return parser


def _shown(settings: Settings) -> Iterator[Setting[Any]]:
    """The settings to print: unsupported ones and deprecated ones only if given."""
    for each in SETTINGS:
        if (each.listed and not each.replaced_by) or settings.source(each.key) != DEFAULT:
            yield each


def setting_rows(settings: Settings) -> list[list[str]]:
    """Name, value and source of each setting, for people."""
    return [
        [each.name, each.text(settings.values[each.key]), str(settings.source(each.key))]
        for each in _shown(settings)
    ]


def settings_json(settings: Settings) -> dict[str, Any]:
    """Value and source of each setting by name, for machines."""
    found = {}
    for each in _shown(settings):
        value, source = settings.values[each.key], settings.source(each.key)
        if not isinstance(value, bool | int | float | None):
            value = list(map(each.text, value)) if isinstance(value, list) else each.text(value)
        found[each.name] = {"value": value, "source": source.kind, "from": source.name}
    return found


def docs_text() -> str:
    """The text of docs/settings.md."""
    parts = [_DOCS_HEAD]
    for title, group in GROUPS.items():
        heading = title[0].upper() + title[1:]
        parts.append(f"## {heading}\n\n| Flag | Value | Default | Description |\n| --- | --- | --- | --- |")
        for each in filter(lambda each: each.listed, group):
            kind = " ".join(f"`{choice}`" for choice in each.choices or ()) or each.unit or each.kind.name
            default = f"`{each.default_text}`" if each.default_text else ""
            scope = "; not for `conch.Server`" if each.scope == "process" else ""
            text = f"{each.description}{scope}".replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
            parts.append(f"| `{each.flag}` | {kind} | {default} | {text} |")
        parts[-1] += "\n"
    return "\n".join(parts)


def keywords_text() -> str:
    """The text of services/conch_api/server_keywords.py."""
    lines = []
    for each in SETTINGS:
        if not each.listed or each.scope == "process":
            continue
        kind = each.kind.python
        if each.choices:
            choices = ", ".join(f'"{choice}"' for choice in each.choices)
            kind = f"Literal[{choices}]"
        several = f" | Sequence[{kind}]" if each.repeatable else ""
        line = f"    {each.key}: {kind}{several} | None"
        lines.append(f"{line}{'' if len(line) <= _LINE else '  # noqa: E501  # fmt: skip'}\n")
    return _KEYWORDS_HEAD + "".join(lines)
