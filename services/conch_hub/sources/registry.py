"""A model in an OCI registry, in the formats of Ollama, Docker and ORAS: a manifest, and layers by digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from conch_hub.download import Download, Downloader
from conch_hub.http_client import BusyError, HttpClient, StatusError, is_local, json_object, shown
from conch_hub.safe_text import safe
from conch_hub.source import Extra, Listing, PullError, RemoteFile

_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MOST_BYTES = 4 << 20  # of a manifest, as in registries
_MOST_LAYERS = 1000
_MOST_TEXT = 1 << 20  # of a layer with a template or parameters

_NAME = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_CHALLENGE = re.compile(r'([A-Za-z]+)="([^"]*)"')
_HOST = re.compile(
    r"(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?|[A-Za-z0-9-]+:[0-9]{1,5}"
)

_WEIGHTS = (
    "application/vnd.ollama.image.model",
    "application/vnd.docker.ai.gguf.v3",
    "application/x-gguf",
)
_PARAMETERS = "application/vnd.ollama.image.params"
_JINJA = "application/vnd.docker.ai.chat.template.file"
_UNUSED = {
    "application/vnd.ollama.image.template": "its template in Go's language: that of the GGUF file is used",
    "application/vnd.ollama.image.system": "its system prompt: give it with --system or /system",
    "application/vnd.ollama.image.messages": "its first messages",
    "application/vnd.ollama.image.adapter": "its LoRA adapter",
    "application/vnd.ollama.image.projector": "its projector for pictures",
    "application/vnd.docker.ai.mmproj": "its projector for pictures",
    "application/vnd.docker.ai.gguf.v3.lora": "its LoRA adapter",
}
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}
"""Ollama's sampling parameters, and their names in ``generation_config.json``."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The name of a model in a registry.

    Attributes:
        host: The registry, perhaps with a port.
        name: Its repository.
        tag: A tag, or a digest with ``sha256:``.
    """

    host: str
    name: str
    tag: str

    @classmethod
    def parse(cls, text: str, host: str = "", namespace: str = "") -> Reference:
        """Reads ``HOST/NAME[:TAG]`` or ``HOST/NAME@sha256:…``.

        Args:
            text: The text.
            host: The registry of names without one; empty if they need one.
            namespace: The first part of names of one part.

        Raises:
            PullError: It is none.
        """
        first, slash, rest = text.partition("/")
        if slash and _HOST.fullmatch(first):
            host, text = first, rest
        elif not host:
            raise PullError(
                f"'{text}' has no registry: write oci://HOST/NAME:TAG, such as oci://docker.io/ai/smollm2"
            )
        name, at, tag = text.partition("@")
        if not at:
            name, _, tag = text.partition(":")
            tag = tag or "latest"
        if "/" not in name and namespace:
            name = f"{namespace}/{name}"
        if not _NAME.fullmatch(name) or not (_DIGEST if at else _TAG).fullmatch(tag):
            raise PullError(f"'{text}' is no name of a model in a registry: write NAME:TAG, or NAME@sha256:…")
        if host == "docker.io":
            host, name = "registry-1.docker.io", name if "/" in name else f"library/{name}"
        return cls(host, name, tag)

    def __str__(self) -> str:
        return f"{self.host}/{self.name}{'@' if ':' in self.tag else ':'}{self.tag}"


class RegistrySource:
    """A model in a registry; a `Source`.

    Args:
        reference: Its name.
        client: Sends the requests.
        secrets: Headers for the registry only; without them it may give an anonymous token.
    """

    def __init__(self, reference: Reference, client: HttpClient, secrets: Mapping[str, str]) -> None:
        self._reference, self._client = reference, client
        self._given, self._token = secrets, ""
        host = urlsplit(f"//{reference.host}").hostname or ""
        self._url = f"{'http' if is_local(host) else 'https'}://{reference.host}/v2/{reference.name}"
        self._digests: dict[str, str] = {}

    def listing(self) -> Listing:
        """Reads the manifest, and the small layers with parameters and a template."""
        layers = self._layers(self._manifest(self._reference.tag))
        files: list[RemoteFile] = []
        extras: list[Extra] = []
        notes: list[str] = []
        kinds = [_text(each.get("mediaType")) for each in layers]
        parts = sum(kind in _WEIGHTS for kind in kinds)
        for layer, kind in zip(layers, kinds, strict=True):
            digest, size = _digest(layer), layer.get("size")
            if not isinstance(size, int) or size < 0:
                raise PullError(f"a layer of '{self._reference}' has no size: the manifest is malformed")
            title = _title(layer)
            if kind in _WEIGHTS:
                count = len(files) + 1
                path = "model.gguf" if parts == 1 else f"model-{count:05}-of-{parts:05}.gguf"
            elif kind == _PARAMETERS:
                extras += self._sampling(digest, size, notes)
                continue
            elif kind == _JINJA:
                extras.append(Extra("chat_template.jinja", self._small(digest, size)))
                continue
            elif kind in _UNUSED:
                notes.append(f"'{self._reference}' brings what has no effect here: {_UNUSED[kind]}")
                continue
            elif title:
                path = title  # ORAS and ModelPack: files by name
            else:
                continue  # such as a licence
            if path in self._digests:
                raise PullError(f"'{self._reference}' has two layers with the title '{path}'")
            self._digests[path] = digest
            files.append(RemoteFile(path, size, digest))
        return Listing(files, extras, notes)

    def fetch(self, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
        """Fetches a layer."""
        wanted = Download(
            self._blob(file.sha256),
            file.size,
            file.sha256,
            secrets=self._secrets,
            renew=None if self._given else self._renewed,
        )
        Downloader(self._client).fetch(wanted, target, progress)

    @property
    def _secrets(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else self._given

    def _renewed(self, error: StatusError) -> Mapping[str, str]:
        """Another token: those of registries expire after minutes."""
        try:
            self._token = self._anonymous_token(error)
        except (StatusError, BusyError) as failed:
            raise PullError(f"{failed}; the same command goes on with what has arrived") from None
        return self._secrets

    def _manifest(self, tag: str) -> dict[str, Any]:
        url = f"{self._url}/manifests/{quote(tag, safe=':')}"
        body, headers = self._read(url, _MOST_BYTES, {"Accept": ", ".join((*_MANIFESTS, *_INDEXES))})
        named = _DIGEST.fullmatch(tag)
        if named and hashlib.sha256(body).hexdigest() != named[1]:
            raise PullError(f"'{shown(url)}' answers with a manifest that has another digest")
        manifest = json_object(body, url)
        kind = manifest.get("mediaType") or headers.get("Content-Type", "").partition(";")[0]
        if kind not in _INDEXES:
            return manifest
        found = manifest.get("manifests")
        if named or not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
            raise PullError(
                f"'{self._reference}' is an index of several images, and no model: name one with @sha256:…"
            )
        return self._manifest(f"sha256:{_digest(found[0])}")

    def _layers(self, manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        layers = manifest.get("layers")
        if not isinstance(layers, list) or not all(isinstance(each, dict) for each in layers):
            raise PullError(f"'{self._reference}' has a manifest without layers: it is no model")
        if len(layers) > _MOST_LAYERS:
            raise PullError(
                f"'{self._reference}' has {len(layers)} layers, and at most {_MOST_LAYERS} are read"
            )
        return layers

    def _sampling(self, digest: str, size: int, notes: list[str]) -> list[Extra]:
        """Ollama's parameters as ``generation_config.json``."""
        given = json_object(self._small(digest, size), self._blob(digest))
        found = {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}
        unused = sorted(given.keys() - _SAMPLING.keys())
        if unused:
            names = ", ".join(safe(name)[:40] for name in unused[:20])
            notes.append(f"'{self._reference}' brings parameters that have no effect here: {names}")
        return [Extra("generation_config.json", json.dumps(found).encode())] if found else []

    def _small(self, digest: str, size: int) -> bytes:
        url = self._blob(digest)
        if size > _MOST_TEXT:
            raise PullError(f"'{shown(url)}' has {size} bytes, which is no text of a model")
        body, _ = self._read(url, _MOST_TEXT, {})
        if hashlib.sha256(body).hexdigest() != digest:
            raise PullError(
                f"'{shown(url)}' has another digest than the manifest says: it was damaged on its way"
            )
        return body

    def _blob(self, digest: str) -> str:
        return f"{self._url}/blobs/sha256:{digest}"

    def _read(self, url: str, most: int, headers: Mapping[str, str]) -> tuple[bytes, Mapping[str, str]]:
        """A small body, with a token if the registry asks for one."""
        try:
            try:
                return self._client.read(url, most, headers=headers, secrets=self._secrets)
            except StatusError as error:
                if error.status != 401 or self._secrets:
                    raise
                self._token = self._anonymous_token(error)
            return self._client.read(url, most, headers=headers, secrets=self._secrets)
        except StatusError as error:
            if error.status in (401, 403):
                raise PullError(
                    f"{error}: give what the registry asks for with -H, such as -H 'Authorization=Basic …', "
                    f"or check the name '{self._reference}'"
                ) from None
            raise PullError(f"{error}: is the name '{self._reference}' right?") from None
        except BusyError as error:
            raise PullError(f"{error}; try again later") from None

    def _anonymous_token(self, error: StatusError) -> str:
        challenge = next(
            (text for name, text in error.headers.items() if name.lower() == "www-authenticate"), ""
        )
        fields = dict(_CHALLENGE.findall(challenge))
        if not challenge.lower().startswith("bearer ") or not fields.get("realm"):
            raise error
        asked = {name: fields[name] for name in ("service", "scope") if name in fields}
        asked.setdefault("scope", f"repository:{self._reference.name}:pull")
        answer = self._client.read_object(f"{fields['realm']}?{urlencode(asked)}", _MOST_TEXT)
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise error
        return token


def _digest(layer: Mapping[str, Any]) -> str:
    """The SHA-256 of a layer."""
    found = _DIGEST.fullmatch(_text(layer.get("digest")))
    if found is None:
        raise PullError(
            "a manifest has a layer without a digest with sha256: nothing else can be verified here"
        )
    return found[1]


def _title(layer: Mapping[str, Any]) -> str:
    annotations = layer.get("annotations")
    if not isinstance(annotations, dict):
        return ""
    return next((_text(annotations[name]) for name in _TITLES if name in annotations), "")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
