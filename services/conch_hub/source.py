"""The interface of a source of models, and the error of all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class PullError(Exception):
    """A model can't be fetched; the text is a sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a source.

    Attributes:
        path: Its path there, with slashes.
        size: Its size in bytes.
        sha256: Its SHA-256 in hexadecimal; empty if the source does not tell it.
        tag: Changes with the content, if the SHA-256 is not known; empty if nothing does.
    """

    path: str
    size: int
    sha256: str = ""
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Extra:
    """A small file that a source makes itself, such as sampling parameters in another form.

    Attributes:
        name: Its name in the version directory.
        content: All of it.
    """

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything that a source has.

    Attributes:
        files: Its files.
        extras: Files that it makes; they go with a GGUF file.
        notes: Sentences for the user on what is there and has no effect.
    """

    files: Sequence[RemoteFile]
    extras: Sequence[Extra] = ()
    notes: Sequence[str] = ()


class Source(Protocol):
    """A model somewhere."""

    def listing(self) -> Listing:
        """Lists the files. Raises PullError."""

    def fetch(self, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
        """Puts a file at a path in an unfinished version directory, or the rest of it after an earlier try.

        Args:
            file: One of the list.
            target: Its path; nothing is there before the file is complete.
            progress: Takes the number of bytes that are there.

        Raises:
            PullError: It can't be fetched; what has arrived stays for the next try.
        """


def bytes_text(count: float) -> str:
    """A number of bytes for people, such as ``98.9 MB``."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count:.0f} B"


def link_or_copy(found: Path, target: Path) -> None:
    """Puts a file at a path, without a copy where that can be."""
    target.unlink(missing_ok=True)
    try:
        os.link(found.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(found, target)
