"""Fetches a model from a source into a repository."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from conch_engines.language.gguf_file import read_metadata
from conch_hub.file_choice import LLAMA, VLLM, Choice, choose_files
from conch_hub.http_client import HttpClient
from conch_hub.safe_text import safe
from conch_hub.source import Listing, PullError, RemoteFile, Source, bytes_text
from conch_hub.sources.object_store import SCHEMES as STORES
from conch_hub.sources.object_store import StoreSource
from conch_hub.sources.registry import Reference, RegistrySource
from conch_hub.sources.web import WebSource
from conch_hub.version_folder import VersionFolder
from conch_tools.progress_bar import ProgressBar

_OLLAMA = ("registry.ollama.ai", "library")
_HUB = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KINDS = (
    "ORGANISATION/NAME or hf://ORGANISATION/NAME of a hub, https://…, s3://…, gs://…, as://…, "
    "oci://HOST/NAME:TAG, ollama://NAME:TAG"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model to fetch.

    Attributes:
        source: The source as given.
        revision: Branch, tag or commit of a hub.
        pattern: Path or pattern of the file.
        sha256: SHA-256 that the file must have; empty if it is not known.
        headers: Headers for the host of a URL or a registry.
        allow_http: True to use other hosts without TLS.
    """

    source: str
    revision: str = ""
    pattern: str = ""
    sha256: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    allow_http: bool = False

    @property
    def scheme(self) -> str:
        """The scheme of the source. Raises PullError: it is none of those known."""
        scheme, separator, _ = self.source.partition("://")
        if separator:
            if scheme in ("hf", "http", "https", "oci", "ollama", *STORES):
                return scheme
        elif _HUB.fullmatch(self.source):
            return "hf"
        raise PullError(f"'{self.source}' is no source of models: it is {_KINDS}")

    @property
    def name(self) -> str:
        """The model's name unless another one is given."""
        scheme, rest = self.scheme, self.source.partition("://")[2] or self.source
        if scheme == "hf":
            found = rest.split("/")[1] if "/" in rest else rest
        elif scheme in ("oci", "ollama"):
            found = rest.partition("@")[0].rpartition("/")[2].removesuffix(":latest").replace(":", "-")
        else:
            found = unquote(urlsplit(self.source).path.rstrip("/").rpartition("/")[2])
        found = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", found)
        found = re.sub(r"-gguf$", "", found, flags=re.IGNORECASE)
        return re.sub(r"[^A-Za-z0-9._+-]+", "-", found).lstrip(".-_+")[:128] or "model"

    def open(self, scratch: Path) -> Source:
        """The source.

        Args:
            scratch: A directory that it may use.

        Raises:
            PullError: It is malformed, or a flag has no effect on it.
        """
        scheme, rest = self.scheme, self.source.partition("://")[2] or self.source
        if self.revision and scheme != "hf":
            where = (
                "the tag is part of the source"
                if scheme in ("oci", "ollama")
                else "the source has no revisions"
            )
            raise PullError(f"--revision is for models of a hub: {where}")
        if self.headers and scheme in ("hf", *STORES):
            raise PullError(
                f"-H is for https:// and oci://: {scheme}:// has credentials of its own, in variables"
            )
        if self.sha256 and scheme not in ("http", "https"):
            raise PullError("--sha256 is for https://: other sources tell it themselves")
        if self.sha256 and not _SHA256.fullmatch(self.sha256):
            raise PullError("--sha256 has 64 digits from 0-9 and a-f")
        client = HttpClient(self.allow_http)
        if scheme == "hf":
            parts = rest.split("/", 2)
            if len(parts) == 3 and self.pattern:
                raise PullError(f"--file and the file in '{self.source}' say the same: give one of them")
            try:
                from conch_hub.sources.hugging_face import HubSource
            except ImportError as error:
                raise PullError(f"a hub needs the package {error.name}: pip install 'conch[hub]'") from None
            return HubSource("/".join(parts[:2]), self.revision, client)
        if scheme in STORES:
            return StoreSource(self.source, scratch)
        if scheme in ("oci", "ollama"):
            host, namespace = _OLLAMA if scheme == "ollama" else ("", "")
            return RegistrySource(Reference.parse(rest, host, namespace), client, self.headers)
        return WebSource(self.source, client, self.headers, self.sha256)

    def choose(self, listing: Listing) -> Choice:
        """The files of the model. Raises PullError."""
        inside = self.source.removeprefix("hf://").split("/", 2)[2:] if self.scheme == "hf" else []
        return choose_files(listing.files, inside[0] if inside else self.pattern)


def pull(
    wanted: Wanted, folder: VersionFolder, say: Reporter, check: Callable[[Choice], None] = lambda _: None
) -> None:
    """Fills a version directory and shows it in its repository.

    Args:
        wanted: The model.
        folder: The directory.
        say: Takes progress and notes.
        check: Raises PullError if the model is of no use, before anything is fetched.

    Raises:
        PullError: It fails; what has arrived stays for the next try.
    """
    source = wanted.open(folder.scratch)
    listing = source.listing()
    choice = wanted.choose(listing)
    check(choice)
    folder.check_config(choice.backends)
    extras = {each.name: each for each in listing.extras} if choice.engine == LLAMA else {}
    files = {name: each for name, each in choice.files.items() if name not in extras}
    folder.begin(json.dumps([wanted.source, {name: asdict(each) for name, each in files.items()}]))
    folder.check_room(choice.size)
    for note in (*listing.notes, *choice.notes):
        say.note(note)
    done = 0
    for name, file in files.items():
        target = folder.path / name
        target.parent.mkdir(exist_ok=True)
        _fetch(source, file, target, say, done, choice.size)
        done += file.size
    for extra in extras.values():
        (folder.path / extra.name).write_bytes(extra.content)
    if choice.engine == VLLM:
        (folder.path / "model.json").write_text('{"model": "weights"}\n')
    say.clear()
    folder.publish(f'backend: "{choice.engine}"\n' if choice.needs_config else "", choice.backends)


def _fetch(source: Source, file: RemoteFile, target: Path, say: Reporter, before: int, total: int) -> None:
    there = target.is_file() and target.stat().st_size == file.size  # of an earlier try
    if not (there and (file.sha256 or file.tag)):
        source.fetch(file, target, lambda arrived: say.progress(before + arrived, total))
    if target.name.endswith(".gguf"):
        try:
            read_metadata(target)
        except ValueError as error:
            target.unlink()
            raise PullError(f"'{file.path}' is no GGUF file: {error}; it is removed") from None


class Reporter:
    """Tells on standard error how a pull goes: with a bar on a terminal."""

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None

    def progress(self, done: int, total: int) -> None:
        """Shows how much is there."""
        if self._bar is None:
            self._bar = ProgressBar(sys.stderr, done, bytes_text)
        self._bar.show(done, done / total if total else 1.0)

    def note(self, text: str) -> None:
        """Says a sentence."""
        self.clear()
        print(safe(text), file=sys.stderr)

    def clear(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.clear()
