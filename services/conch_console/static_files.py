"""The files of the console's pages, compressed once and kept in memory.

The page names its files with a version in the query, made of the contents of all; those answers may be kept
for ever. The page itself is asked for each time. Threads and locks: event loop only.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from conch.frontends.http.http_exchange import Headers, HttpExchange, Reply
from conch.frontends.http.json_body import text_error

PAGE: Final = "index.html"
_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_FOR_EVER: Final = b"public, max-age=31536000, immutable"
_ASK: Final = b"no-cache"
_IMPORT: Final = re.compile(rb"""(?<=["'])(\.{1,2}/[\w./-]+\.js)(?=["'])""")
_VERSION: Final = b"VERSION"


class StaticFile(NamedTuple):
    """One file.

    Attributes:
        kind: Its media type.
        content: Its bytes.
        packed: The same, compressed by gzip.
        tag: Its ETag.
    """

    kind: bytes
    content: bytes
    packed: bytes
    tag: bytes


class StaticFiles:
    """All files by path.

    Attributes:
        files: By path, such as ``js/main.js``.
        version: Changes with any file.
    """

    def __init__(self) -> None:
        found = {path: content for path, content in _read(files("conch_console") / "static", "")}
        digest = hashlib.sha256(b"".join(name.encode() + content for name, content in sorted(found.items())))
        self.version = digest.hexdigest()[:12]
        self.files = {name: self._file(name, content) for name, content in found.items()}

    def answer(self, exchange: HttpExchange, path: str) -> Reply:
        """The answer to a request for a file; the empty path is the page."""
        name = path or PAGE
        found = self.files.get(name)
        if found is None:
            return text_error("Not Found", 404)
        lasting = exchange.query == f"v={self.version}"
        headers: Headers = [
            (b"content-type", found.kind),
            (b"etag", found.tag),
            (b"cache-control", _FOR_EVER if lasting else _ASK),
            (b"vary", b"accept-encoding"),
        ]
        if found.tag in exchange.fields.get(b"if-none-match", b"").split(b", "):
            return Reply(304, headers)
        if b"gzip" in exchange.fields.get(b"accept-encoding", b""):
            return Reply(200, [*headers, (b"content-encoding", b"gzip")], found.packed)
        return Reply(200, headers, found.content)

    def _file(self, name: str, content: bytes) -> StaticFile:
        suffix = name.rpartition(".")[2]
        version = self.version.encode()
        if suffix == "html":
            content = content.replace(_VERSION, version)
        elif suffix == "js":  # a module names others without a version
            content = _IMPORT.sub(rb"\1?v=" + version, content)
        tag = b'"%b"' % hashlib.sha256(content).hexdigest()[:16].encode()
        return StaticFile(_TYPES[suffix], content, gzip.compress(content, 9, mtime=0), tag)


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            found.append((f"{prefix}{entry.name}", entry.read_bytes()))
    return found
