"""The curl commands of a page: running them, and comparing with what the page says comes back."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE_S

REST = "…"
"""Stands for anything, in a page: a whole value, a part of a text, further members or elements, lines."""

_BLOCK = re.compile(
    r"^```sh\n(?P<command>.*?)^```\n(?:^```http\n(?P<answer>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
# Whatever the command does with the answer, its status and headers are seen.
_CURL = """
set -eu -o pipefail
curl() { command curl --silent --show-error --dump-header "$HEADERS" "$@"; }
"""


@dataclass(frozen=True)
class Example:
    """A command of a page, and what the page says of it.

    Attributes:
        command: Bash.
        status: The HTTP status of its curl.
        headers: Some of the answer's headers, names in lower case.
        output: An excerpt of what is printed.
    """

    command: str
    status: int
    headers: Mapping[str, str]
    output: str

    def __str__(self) -> str:
        return self.command


def examples(page: Path, level: int) -> dict[str, list[Example]]:
    """The commands of a page with curl in them, by the heading of some level before them."""
    found: dict[str, list[Example]] = {}
    for section in re.split(rf"^{'#' * level} ", page.read_text(), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        for block in _BLOCK.finditer(section):
            if "curl " in block["command"]:
                assert block["answer"] is not None, f"no answer after {block['command']}"
                found.setdefault(heading, []).append(_example(block["command"], block["answer"]))
    return found


def _example(command: str, answer: str) -> Example:
    head, _, output = answer.partition("\n\n")
    status, *lines = head.splitlines()
    pairs = (line.partition(": ") for line in lines)
    return Example(command, int(status), {name.lower(): value for name, _, value in pairs}, output)


def run(example: Example, addresses: Mapping[str, str], directory: Path) -> None:
    """Runs a command, with real addresses for those of the page, and checks what comes back."""
    command = example.command
    for documented, actual in addresses.items():
        command = command.replace(documented, actual)
    headers = directory / "headers"
    done = subprocess.run(
        ["bash", "-c", _CURL + command],
        cwd=directory,
        env={**os.environ, "HEADERS": str(headers)},
        capture_output=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{example}\n{done.stderr.decode(errors='replace')}"
    status, received = _received(headers.read_text())
    assert status == example.status, f"{example}\n{status}: {output}"
    for name, value in example.headers.items():
        assert _matches(value, received.get(name, "absent")), f"{example}\n{name}: {received.get(name)}"
    difference = differs(example.output, output)
    assert difference is None, f"{example}\n{difference}\n{output}"


def _received(dump: str) -> tuple[int, dict[str, str]]:
    """Status and headers of the last response in curl's dump: one before it allows the client to go on."""
    last = dump.replace("\r\n", "\n").strip().split("\n\n")[-1]
    line, *lines = last.splitlines()
    pairs = (each.partition(":") for each in lines)
    return int(line.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


def differs(documented: str, actual: str) -> str | None:
    """First difference between an output and an excerpt; None if there is none.

    An excerpt that begins with JSON is compared as such, and the rest as text.
    """
    if documented.lstrip()[:1] in {"{", "["}:
        decoder = json.JSONDecoder()
        expected, end = decoder.raw_decode(documented.lstrip())
        try:
            found, length = decoder.raw_decode(actual.lstrip())
        except json.JSONDecodeError as error:
            return f"not JSON: {error}"
        difference = _difference(expected, found, "answer")
        if difference is not None:
            return difference
        documented, actual = documented.lstrip()[end:], actual.lstrip()[length:]
    return None if _matches(documented, actual) else f"{actual.strip()!r} is not like {documented.strip()!r}"


def _matches(documented: str, actual: str) -> bool:
    """True if a text is like an excerpt, whatever the white space."""
    words = " ".join(documented.split())
    pattern = re.escape(words).replace(re.escape(REST), ".*")
    return re.fullmatch(pattern, " ".join(actual.split())) is not None


def _difference(expected: Any, found: Any, where: str) -> str | None:
    if expected == REST:
        return None
    if isinstance(expected, str) and isinstance(found, str):
        return None if _matches(expected, found) else f"{where} is {found!r}"
    if type(expected) is not type(found):
        return f"{where} is {found!r}"
    if isinstance(expected, dict):
        for key, value in expected.items():
            if key == REST:
                continue
            if key not in found:
                return f"{where} has no {key!r}"
            difference = _difference(value, found[key], f"{where}.{key}")
            if difference is not None:
                return difference
        return None
    if isinstance(expected, list):
        return _difference_of_lists(expected, found, where)
    return None if expected == found else f"{where} is {found!r}"


def _difference_of_lists(expected: Sequence[Any], found: Sequence[Any], where: str) -> str | None:
    """With the sign for the rest at its end an excerpt's elements come in the list in their order."""
    if REST not in expected:
        if len(expected) != len(found):
            return f"{where} has {len(found)} elements"
        pairs = enumerate(zip(expected, found, strict=True))
        differences = (_difference(one, other, f"{where}[{number}]") for number, (one, other) in pairs)
        return next((each for each in differences if each is not None), None)
    assert expected[-1] == REST and REST not in expected[:-1], f"{where}: {REST} must be the last element"
    rest = iter(found)
    for number, one in enumerate(expected[:-1]):
        if not any(_difference(one, other, where) is None for other in rest):
            return f"{where} has nothing like element {number} of the page"
    return None
