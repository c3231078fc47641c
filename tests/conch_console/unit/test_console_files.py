"""The files of the console's pages: small, pinned, safe and cached."""

from __future__ import annotations

import gzip
import hashlib
import re

import pytest
from tests.support.console import STATIC

from conch.frontends.http.http_exchange import Reply
from conch_console.static_files import StaticFiles

FIRST_LOAD_BYTES = 90 * 1024
OWN_BYTES = 67 * 1024
VENDORED = {
    "preact-htm.LICENSE.txt": "e0e15daa77db61a0e27c4364c614984bc0688fa8cf91901bd7ebf5717a444736",
    "preact-htm.module.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "uPlot.LICENSE.txt": "c70537f2cc68d032dfe88fa1ad387784ff3ba1c8322064bd5395e95a1762937b",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""htm 3.1.1 with preact, and uPlot 1.6.32, as the npm registry has them."""


class Exchange:
    """A request, as far as files look at it."""

    def __init__(self, query: str = "", **fields: str) -> None:
        self.query = query
        self.fields = {name.replace("_", "-").encode(): value.encode() for name, value in fields.items()}


def answer(files: StaticFiles, path: str, query: str = "", **fields: str) -> Reply:
    return files.answer(Exchange(query, **fields), path)  # type: ignore[arg-type]


def imports(files: StaticFiles, name: str, lazy: bool) -> set[str]:
    """A file with all that it imports, by `import()` only if `lazy`."""
    seen: set[str] = set()
    unseen = [name]
    while unseen:
        path = unseen.pop()
        if path in seen:
            continue
        seen.add(path)
        text = files.files[path].content.decode()
        pattern = r"""(?:from|import\(?) ?["'](\.[^"'?]+)\?v=""" if lazy else r"""from ["'](\.[^"'?]+)\?v="""
        for found in re.findall(pattern, text):
            parts = path.split("/")[:-1]
            for part in found.split("/"):
                if part == "..":
                    parts.pop()
                elif part != ".":
                    parts.append(part)
            unseen.append("/".join(parts))
    return seen


def test_the_first_load_is_small() -> None:
    files = StaticFiles()
    page = files.files["index.html"].content.decode()
    named = re.findall(r'(?:href|src)="([^"?]+)\?v=', page)
    assert len(named) == 6
    everything = {"index.html"}.union(*(imports(files, name, lazy=False) for name in named))
    assert sum(len(files.files[name].packed) for name in everything) <= FIRST_LOAD_BYTES
    # Pages that are read later are few bytes more.
    whole = {"index.html"}.union(*(imports(files, name, lazy=True) for name in named))
    own = sum(len(files.files[name].packed) for name in whole if name.startswith("js/"))
    assert own <= OWN_BYTES
    assert whole == set(files.files)  # nothing is shipped that no page asks for


def test_vendored_files_are_what_was_reviewed() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()
    }
    assert found == VENDORED


def test_pages_hold_no_inline_script_and_write_no_markup() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|<style|\bstyle=", page)
    for path in STATIC.rglob("js/**/*.js"):
        text = path.read_text()
        for risky in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert risky not in text, path


def test_answers_are_compressed_and_kept() -> None:
    files = StaticFiles()
    page = answer(files, "")
    assert (b"cache-control", b"no-cache") in page.headers
    assert files.version.encode() in bytes(page.body)  # type: ignore[arg-type]
    lasting = answer(files, "js/main.js", f"v={files.version}", accept_encoding="gzip, br")
    headers = dict(lasting.headers)
    assert headers[b"cache-control"] == b"public, max-age=31536000, immutable"
    assert headers[b"content-encoding"] == b"gzip"
    assert gzip.decompress(lasting.body) == files.files["js/main.js"].content  # type: ignore[arg-type]
    assert dict(answer(files, "js/main.js", "v=older").headers)[b"cache-control"] == b"no-cache"
    tag = headers[b"etag"].decode()
    assert answer(files, "js/main.js", if_none_match=tag).status == 304


@pytest.mark.parametrize(
    "path", ["../console_app.py", "js", "js/", "vendor/uPlot.LICENSE.txt", "js/../index.html"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert answer(StaticFiles(), path).status == 404
