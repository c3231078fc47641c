"""A GGUF file at a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from conch_engines.llama_cpp.llama_file import all_parts
from conch_hub.download import Download, Downloader, place_of, strong_tag
from conch_hub.http_client import BusyError, HttpClient, StatusError, shown
from conch_hub.source import Listing, PullError, RemoteFile

_MAGIC = b"GGUF"


class WebSource:
    """A file at a URL, or all parts of one whose first part is there; a `Source`.

    Args:
        url: The address.
        client: Sends the requests.
        secrets: Headers for the URL's host only.
        sha256: SHA-256 that the file must have; empty if it is not known.
    """

    def __init__(self, url: str, client: HttpClient, secrets: Mapping[str, str], sha256: str) -> None:
        self._client, self._secrets, self._sha256 = client, secrets, sha256
        parts = urlsplit(url)
        folder, _, last = parts.path.rpartition("/")
        names = [each.name for each in all_parts(Path(unquote(last) or "model"))]
        if len(names) == 1:
            self._urls = {unquote(last): url}
        else:
            self._urls = {name: urlunsplit(parts._replace(path=f"{folder}/{quote(name)}")) for name in names}
            if sha256:
                raise PullError(f"--sha256 is of one file, and '{shown(url)}' is one of {len(names)} parts")

    def listing(self) -> Listing:
        """Asks for the first bytes of each file."""
        found = []
        for name, url in self._urls.items():
            size, first, tag = self._look(url)
            if first != _MAGIC:
                raise PullError(
                    f"'{shown(url)}' is no GGUF file: it begins with {first!r}. Is it the address of a page "
                    f"instead of the file?"
                )
            safe = name if name.endswith(".gguf") else "model.gguf"
            found.append(RemoteFile(safe, size, self._sha256, tag))
        self._urls = dict(zip((each.path for each in found), self._urls.values(), strict=True))
        return Listing(found)

    def fetch(self, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
        """Fetches a file."""
        wanted = Download(self._urls[file.path], file.size, file.sha256, secrets=self._secrets)
        Downloader(self._client).fetch(wanted, target, progress)

    def _look(self, url: str) -> tuple[int, bytes, str]:
        """Size, first bytes and entity tag; asked with GET, as signed URLs are for one method."""
        try:
            with self._client.get(url, {"Range": f"bytes=0-{len(_MAGIC) - 1}"}, self._secrets) as answer:
                return place_of(answer, 0)[1], answer.read(len(_MAGIC)), strong_tag(answer)
        except StatusError as error:
            if error.status in (401, 403):
                raise PullError(
                    f"{error}: give what it asks for with -H, such as -H 'Authorization=Bearer …'"
                ) from None
            raise PullError(f"{error}: is the address right?") from None
        except (BusyError, OSError, HTTPException) as error:
            raise PullError(f"{error}; try again later, or use another source") from None
