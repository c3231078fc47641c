"""Downloads a file over HTTP: resumes what an earlier try has left, and verifies it.

Beside ``x`` lie ``x.partial``, its beginning, and ``x.partial.json``, which tells the content that it is the
beginning of: a SHA-256, or the URL with the entity tag of the answer. A beginning is only continued if the
content is the same: of a known SHA-256 because the end is verified, else because the server compares the tag
(``If-Range``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from conch_hub.http_client import BusyError, HttpClient, StatusError, shown
from conch_hub.source import PullError

_BLOCK = 1 << 20
_TRIES = 5
"""Tries in a row in which nothing arrives."""

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_UNCHANGED, _UNAUTHORIZED, _UNSATISFIABLE = 206, 401, 416


@dataclass(frozen=True, slots=True)
class Download:
    """A file over HTTP.

    Attributes:
        url: Its address.
        size: Its size in bytes.
        sha256: Its SHA-256 in hexadecimal; empty if it is not known.
        headers: Sent to each host.
        secrets: Sent to the host of `url` only.
        renew: Gives other secrets after a refusal with status 401, such as of a token that has expired.
    """

    url: str
    size: int
    sha256: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    renew: Callable[[StatusError], Mapping[str, str]] | None = None


class Downloader:
    """Fetches files.

    Args:
        client: Sends the requests.
        pause: Waits some seconds before another try.
    """

    def __init__(self, client: HttpClient, pause: Callable[[float], object] | None = None) -> None:
        self._client = client
        self._pause = threading.Event().wait if pause is None else pause

    def fetch(self, wanted: Download, target: Path, progress: Callable[[int], None]) -> None:
        """Puts the file at `target`.

        Raises:
            PullError: It can't be fetched, has another size or another SHA-256.
        """
        with _Partial(target, wanted) as partial:
            failures = most = 0
            renewed = -1
            while partial.size < wanted.size:
                progress(partial.size)
                try:
                    self._rest(wanted, partial, progress)
                except BusyError as error:
                    failures = failures + 1 if partial.size <= most else 1
                    most = max(most, partial.size)
                    if failures == _TRIES:
                        raise PullError(f"{error}; the same command goes on with what has arrived") from None
                    self._pause(2.0 ** (failures - 1))
                except StatusError as error:
                    if error.status != _UNAUTHORIZED or wanted.renew is None or renewed == partial.size:
                        raise PullError(f"{error}: is the address right, and may you read it?") from None
                    renewed = partial.size
                    wanted = replace(wanted, secrets=wanted.renew(error))
            progress(partial.size)
            partial.finish(target)

    def _rest(self, wanted: Download, partial: _Partial, progress: Callable[[int], None]) -> None:
        if not (wanted.sha256 or partial.tag):
            partial.restart("")
        start = partial.size
        headers = dict(wanted.headers)
        if start:
            headers["Range"] = f"bytes={start}-"
            if not wanted.sha256:
                headers["If-Range"] = partial.tag
        try:
            answer = self._client.get(wanted.url, headers, wanted.secrets)
        except StatusError as error:
            if error.status != _UNSATISFIABLE or not start:
                raise
            partial.restart("")
            raise BusyError(f"'{shown(wanted.url)}' has no byte {start}") from None
        with answer:
            start, size = place_of(answer, start, wanted.size)
            if size != wanted.size:
                raise PullError(
                    f"'{shown(wanted.url)}' has {size} bytes, and {wanted.size} were announced: it changes, "
                    f"or a proxy changes it; try again"
                )
            tag = strong_tag(answer)
            if not start:
                partial.restart(tag)
            elif not wanted.sha256 and tag != partial.tag:
                partial.restart("")
                raise BusyError(f"'{shown(wanted.url)}' has changed")
            self._copy(answer, wanted, partial, progress)

    def _copy(
        self, answer: HTTPResponse, wanted: Download, partial: _Partial, progress: Callable[[int], None]
    ) -> None:
        while partial.size < wanted.size:
            try:
                block = answer.read1(min(_BLOCK, wanted.size - partial.size))
            except (OSError, HTTPException) as error:
                raise BusyError(f"'{shown(wanted.url)}' broke off: {error}") from None
            if not block:
                raise BusyError(f"'{shown(wanted.url)}' ended after {partial.size} of {wanted.size} bytes")
            partial.append(block)
            progress(partial.size)


class _Partial:
    """The beginning of a file, open for appending.

    Attributes:
        size: Its bytes.
        tag: The entity tag of the answer that it came with.
    """

    def __init__(self, target: Path, wanted: Download) -> None:
        self._path = target.with_name(f"{target.name}.partial")
        self._state = target.with_name(f"{target.name}.partial.json")
        self._wanted = wanted
        self._digest = hashlib.sha256()
        self.size, self.tag = 0, ""
        goes_on = self._goes_on()
        self._file = self._path.open("r+b" if goes_on else "w+b")
        while block := self._file.read(_BLOCK):
            self._digest.update(block)
            self.size += len(block)
        if not goes_on or self.size > wanted.size:
            self.restart("")

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def restart(self, tag: str) -> None:
        """Drops what is there; what comes has this entity tag."""
        self.size, self.tag = 0, tag
        self._digest = hashlib.sha256()
        self._file.seek(0)
        self._file.truncate()
        self._state.write_text(json.dumps(self._identity()))

    def append(self, block: bytes) -> None:
        """Adds bytes. Raises PullError: they can't be written."""
        try:
            self._file.write(block)
            self._file.flush()
        except OSError as error:
            raise PullError(
                f"'{self._path}' can't be written: {error.strerror}; make room, and the same command goes on"
            ) from None
        self._digest.update(block)
        self.size += len(block)

    def finish(self, target: Path) -> None:
        """Moves the whole file to its place. Raises PullError: its SHA-256 is wrong; it is removed."""
        found, wanted = self._digest.hexdigest(), self._wanted.sha256
        self._state.unlink()
        if wanted and found != wanted:
            self._path.unlink()
            raise PullError(
                f"'{shown(self._wanted.url)}' has the SHA-256 {found}, and {wanted} was expected: it is "
                f"another file, or was damaged on its way; what has arrived is removed"
            )
        os.fsync(self._file.fileno())
        self._path.replace(target)

    def _goes_on(self) -> bool:
        """True if what is there is the beginning of the wanted content."""
        try:
            state = json.loads(self._state.read_text())
            self.tag = str(state.get("tag", ""))
        except (OSError, ValueError, AttributeError):
            return False
        known = bool(self._wanted.sha256 or self.tag)
        return known and state == self._identity() and self._path.is_file()

    def _identity(self) -> dict[str, str]:
        if self._wanted.sha256:
            return {"sha256": self._wanted.sha256}
        return {"url": self._wanted.url, "tag": self.tag}


def strong_tag(answer: HTTPResponse) -> str:
    """The entity tag of an answer; empty if it is weak: that is no promise on bytes."""
    tag = str(answer.headers.get("ETag", ""))
    return tag if tag.startswith('"') else ""


def place_of(answer: HTTPResponse, asked: int, known: int | None = None) -> tuple[int, int]:
    """The place of an answer's first byte, and the size of the file.

    Args:
        answer: The answer.
        asked: The place that was asked for.
        known: The size, for answers that do not tell it.

    Raises:
        PullError: The answer can't be used.
    """
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise PullError(
            f"'{shown(answer.url)}' is sent compressed, so that it can't be continued or measured"
        )
    if answer.status == _UNCHANGED:
        found = _RANGE.fullmatch(str(answer.headers.get("Content-Range", "")))
        if found is None or int(found[1]) != asked:
            raise PullError(
                f"'{shown(answer.url)}' answers with another part of the file than that from {asked} on"
            )
        return asked, int(found[2])
    if answer.length is None and known is not None:
        return 0, known
    if answer.length is None:
        raise PullError(
            f"'{shown(answer.url)}' does not say how long it is (Content-Length), so its end can't be known"
        )
    return 0, answer.length
