"""HTTP servers that models are fetched from: plain files, a hub, and a registry."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from conch_engines.language.random_model import write_random_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Page:
    """An answer of the server.

    Attributes:
        content: Its body.
        tag: Its entity tag; empty for none.
        breaks: Numbers of bytes after which the next answers break off.
        ranges: False if it ignores ranges.
        place: Address that it redirects to; empty for none.
        secret: The `Authorization` without which it is a 401.
        challenge: `WWW-Authenticate` of that.
        headers: More headers.
        status: The status; 0 for that of its content.
    """

    content: bytes = b""
    tag: str = ""
    breaks: list[int] = field(default_factory=list)
    ranges: bool = True
    place: str = ""
    secret: str = ""
    challenge: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 0


@dataclass
class Asked:
    """A request."""

    path: str
    headers: Mapping[str, str]


class ModelSite:
    """A server with pages.

    Attributes:
        port: Its port.
        pages: Its pages by path.
        asked: The requests so far.
        tokens: Tokens that the next requests for one get, instead of that of an image.
    """

    def __init__(self) -> None:
        self.port = 0
        self.pages: dict[str, Page] = {}
        self.asked: list[Asked] = []
        self.tokens: list[str] = []

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def ranges(self, path: str) -> list[str | None]:
        """The ranges that were asked for of a page."""
        return [each.headers.get("Range") for each in self.asked if each.path == path]

    def put_hub(self, repository: str, files: Mapping[str, bytes], cdn: ModelSite) -> None:
        """Makes it a hub with a repository, whose large files are on another server."""
        siblings: list[dict[str, Any]] = []
        for name, content in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": name}
            page = Page(content, f'"{name}"', headers={"X-Repo-Commit": COMMIT})
            if name.endswith(".gguf"):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
                cdn.pages[f"/lfs/{sha256}"] = Page(content, f'"{sha256}"')
                page = Page(place=f"{cdn.url}/lfs/{sha256}")
            self.pages[f"/{repository}/resolve/{COMMIT}/{name}"] = page
            siblings.append(entry)
        about = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
        answer = Page(json.dumps(about).encode())
        self.pages[f"/api/models/{repository}"] = self.pages[f"/api/models/{repository}/revision/v1"] = answer

    def put_image(
        self, name: str, tag: str, layers: Sequence[tuple[str, bytes, Mapping[str, str]]], token: str = ""
    ) -> None:
        """Makes it a registry with a model: media type, content and annotations of each layer."""
        challenge = f'Bearer realm="{self.url}/token",service="here",scope="repository:{name}:pull"'
        secret = f"Bearer {token}" if token else ""
        described = []
        for kind, content, notes in layers:
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            described.append(
                {"mediaType": kind, "digest": digest, "size": len(content), "annotations": dict(notes)}
            )
            self.pages[f"/v2/{name}/blobs/{digest}"] = Page(content, secret=secret, challenge=challenge)
        kind = "application/vnd.oci.image.manifest.v1+json"
        manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "layers": described}).encode()
        page = Page(manifest, secret=secret, challenge=challenge, headers={"Content-Type": kind})
        digest = hashlib.sha256(manifest).hexdigest()
        self.pages[f"/v2/{name}/manifests/{tag}"] = self.pages[f"/v2/{name}/manifests/sha256:{digest}"] = page
        self.pages["/token"] = Page(json.dumps({"token": token}).encode())


@contextmanager
def model_site() -> Iterator[ModelSite]:
    """A server for a block."""
    site = ModelSite()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            site.asked.append(Asked(path, dict(self.headers.items())))
            self.close_connection = True
            page = site.pages.get(path)
            if path == "/token" and site.tokens:
                page = Page(json.dumps({"token": site.tokens.pop(0)}).encode())
            if page is None:
                self._send(404, b"", {})
            elif page.place:
                self._send(302, b"", {"Location": page.place})
            elif page.secret and self.headers.get("Authorization") != page.secret:
                self._send(401, b"", {"WWW-Authenticate": page.challenge})
            else:
                self._answer(page)

        def _answer(self, page: Page) -> None:
            headers = {**page.headers, **({"ETag": page.tag} if page.tag else {})}
            asked = self.headers.get("Range")
            unchanged = self.headers.get("If-Range") in (None, page.tag)
            size = len(page.content)
            status, body = 200, page.content
            if asked and page.ranges and unchanged:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or size - 1), size - 1)
                if start >= size:
                    self._send(416, b"", {"Content-Range": f"bytes */{size}"})
                    return
                status, body = 206, page.content[start : end + 1]
                headers["Content-Range"] = f"bytes {start}-{end}/{size}"
            cut = page.breaks.pop(0) if page.breaks and len(body) > 4 else len(body)
            self._send(page.status or status, body, headers, cut)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Transfer-Encoding" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")  # or a client may ask again while it is being closed
            self.end_headers()
            self.wfile.write(body[:cut])

        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                super().handle()

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # so that closing waits for them

    server = Server(("127.0.0.1", 0), Handler)
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def gguf_bytes(directory: Path, seed: int = 7) -> bytes:
    """A random model as a file's content."""
    path = directory / f"random-{seed}.gguf"
    write_random_model(path, seed)
    return path.read_bytes()
