"""An MLflow server as a store of files: its REST API, and artifacts that it hands out or that lie elsewhere.

A directory of artifacts has a root, and a file the path ``<root>/<path in the directory>``:

| root | files |
|---|---|
| ``artifacts:<path>`` | the server hands them out (``mlflow-artifacts:/<path>``) |
| ``version:<name>/<version>/<model id>`` | the server reads them from where only it can, such as its disk |
| ``s3://…``, ``gs://…`` | read from the object store |

A path ``generated:<digest>`` is a file that conch has made. Each file is read by one request, block after
block: for artifacts that the server takes from an object store itself, it fetches the whole file for each.

Owns: threads for requests, open bodies. Runs on the event loop of `Connection`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote, urlencode

from conch.core.errors import ConchError, InvalidArgumentError
from conch_mlflow.locations import MlflowCredentials, MlflowLocation
from conch_mlflow.registry import MalformedError
from conch_mlflow.registry_http import Body, RegistryHttp
from conch_stores.credentials import CredentialReader
from conch_stores.locations import parse_location
from conch_stores.stores import OpenStore, Store, StoredObject, is_safe

T = TypeVar("T")

API = "api/2.0/mlflow"
_PROXY = "api/2.0/mlflow-artifacts/artifacts"
_ARTIFACTS, _VERSION, _GENERATED = "artifacts:", "version:", "generated:"
_THREADS = 16
_DEEPEST = 32
_MOST_FILES = 100_000


@dataclass(eq=False, slots=True)
class _Reading:
    """A file that is read; the lock is held for each block, `used` is the time of the last one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    body: Body | None = None
    etag: str = ""
    used: float = 0.0

    def drop(self) -> None:
        body, self.body = self.body, None
        if body is not None:
            body.close()


class RegistryStore:
    """An MLflow server; a `Store`.

    Args:
        http: Requests to it.
        generated: Contents of files that conch has made, by digest.
        credentials: Those of object stores.
        silence_s: Longest silence of an object store, and between blocks of a file.
    """

    def __init__(
        self,
        http: RegistryHttp,
        generated: Mapping[str, bytes],
        credentials: CredentialReader,
        silence_s: float,
    ) -> None:
        self._http = http
        self._generated = generated
        self._credentials = credentials
        self._silence_s = silence_s
        self._threads = ThreadPoolExecutor(_THREADS, "conch-mlflow")
        self._reading: dict[str, _Reading] = {}
        self._opening = asyncio.Lock()
        self._stores: dict[str, Store] = {}  # object stores by root

    async def ask(self, method: str, **query: str) -> dict[str, Any]:
        """Calls a method of the REST API, such as ``registered-models/search``."""
        return await self._run(lambda: self._http.json(f"{API}/{method}?{urlencode(query)}"))

    async def list(self, prefix: str) -> list[StoredObject]:
        """All files of a root."""
        if "://" in prefix:
            store = await self._object_store(prefix)
            return [
                replace(each, path=f"{prefix}/{each.path}")
                for each in await store.list("")
                if not each.path.endswith("/")
            ]
        found: list[StoredObject] = []
        unseen = [""]
        while unseen:
            directory = unseen.pop()
            for each in await self._run(partial(self._list_one, prefix, directory)):
                if each.path.endswith("/"):
                    unseen.append(each.path)
                else:
                    found.append(replace(each, path=f"{prefix}/{each.path}"))
            if len(found) > _MOST_FILES or directory.count("/") > _DEEPEST:
                raise MalformedError(f"artifacts '{prefix}' have too many files or directories")
        return found

    async def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes of a file."""
        if path.startswith(_GENERATED):
            return self._generated[path.removeprefix(_GENERATED)][start:end]
        if "://" in path:
            root = max((each for each in self._stores if path.startswith(f"{each}/")), key=len, default="")
            if not root:
                raise FileNotFoundError(f"'{path}' was not listed")
            store = self._stores[root]
            return await store.read(path[len(root) + 1 :], start, end)
        self._drop_idle()
        reading = self._reading.setdefault(path, _Reading())
        async with reading.lock:
            try:
                data = await self._block(reading, path, start, end - start)
            except asyncio.CancelledError:
                reading.body = None  # closed by the thread that has it
                raise
            except BaseException:
                reading.drop()
                raise
            reading.used = asyncio.get_running_loop().time()
            if reading.body is not None and reading.body.ended:
                reading.drop()
                self._reading.pop(path, None)
            return data

    def _drop_idle(self) -> None:
        """Closes the bodies of fetches that were given up."""
        oldest = asyncio.get_running_loop().time() - self._silence_s
        for path, reading in list(self._reading.items()):
            if not reading.lock.locked() and reading.used < oldest:
                reading.drop()
                self._reading.pop(path, None)

    async def close(self) -> None:
        """Ends all requests and closes the connections."""
        self._http.abort()
        for reading in self._reading.values():
            reading.drop()
        await asyncio.to_thread(self._threads.shutdown)
        for store in self._stores.values():
            await store.close()

    async def _block(self, reading: _Reading, path: str, start: int, size: int) -> bytes:
        if reading.body is None or reading.body.position != start:
            reading.drop()
            target, etag = _target(path), reading.etag
            reading.body = await self._run(lambda: self._http.body(target, start, etag), _close)
            reading.etag = reading.body.etag
        body = reading.body
        return await self._run(lambda: body.read(size), lambda data: body.close())

    def _list_one(self, root: str, directory: str) -> Sequence[StoredObject]:
        path = directory.rstrip("/")
        if root.startswith(_ARTIFACTS):
            whole = "/".join(filter(None, (root.removeprefix(_ARTIFACTS), path)))
            data = self._http.json(f"{_PROXY}?{urlencode({'path': whole})}")
        else:
            model_id = root.rpartition("/")[2]
            query = urlencode({"artifact_directory_path": path} if path else {})
            data = self._http.json(f"{API}/logged-models/{model_id}/artifacts/directories?{query}")
        found = []
        for each in data.get("files", ()):
            try:
                name = str(each["path"]).rpartition("/")[2]
                size = int(each.get("file_size", 0))
                is_directory = bool(each.get("is_dir", False))
            except (KeyError, TypeError, ValueError, AttributeError):
                raise MalformedError("it answers with artifacts that MLflow does not write") from None
            if not is_safe(name) or not name.isprintable():
                raise MalformedError(f"artifacts '{root}': {name!r} can't be the name of a file")
            found.append(StoredObject(f"{directory}{name}{'/' if is_directory else ''}", size, "", 0))
        return found

    async def _object_store(self, root: str) -> Store:
        async with self._opening:
            store = self._stores.get(root)
            if store is None:
                store = self._stores[root] = await self._opened(root)
            return store

    async def _opened(self, root: str) -> Store:
        try:
            open_store = _opener(root.partition("://")[0])
        except ImportError as error:
            scheme = root.partition("://")[0]
            extra = {"s3": "s3", "gs": "gcs"}[scheme]
            raise OSError(
                f"artifacts '{root}' need the package '{error.name}', which is not installed: "
                f"pip install 'conch[{extra}]'"
            ) from None
        try:
            location = parse_location(root)
            credentials = await asyncio.to_thread(self._credentials.read, location)
            return await open_store(location, credentials, self._silence_s)
        except ConchError as error:
            raise OSError(f"artifacts '{root}': {error.message}") from None

    async def _run(self, work: Callable[[], T], undo: Callable[[T | None], None] | None = None) -> T:
        """Runs work on a thread; see `_Work` for `undo`."""
        given = _Work(work, undo or (lambda result: None))
        future = asyncio.get_running_loop().run_in_executor(self._threads, given.run)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # as if awaited
            given.abandon()
            raise


class _Work(Generic[T]):
    """Work on a thread, whose caller may be cancelled.

    Args:
        work: The work.
        undo: Called with its result, or None if it has failed, if the caller was cancelled meanwhile. On the
            thread, so also if the loop has ended by then.
    """

    def __init__(self, work: Callable[[], T], undo: Callable[[T | None], None]) -> None:
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()
        self._result: T | None = None
        self._over = self._abandoned = False

    def run(self) -> T:
        """Does the work; raises its errors."""
        try:
            self._result = result = self._work()
            return result
        finally:
            with self._lock:
                self._over = True
                abandoned = self._abandoned
            if abandoned:
                self._undo(self._result)

    def abandon(self) -> None:
        """Undoes the work, now or once it is over."""
        with self._lock:
            self._abandoned = True
            over = self._over
        if over:
            self._undo(self._result)


def _close(body: Body | None) -> None:
    if body is not None:
        body.close()


def _opener(scheme: str) -> OpenStore:
    if scheme == "s3":
        from conch_stores.s3 import open_store as open_s3

        return open_s3
    from conch_stores.gcs import open_store as open_gcs

    return open_gcs


class UnreadableError(ValueError):
    """Artifacts lie where they can't be read; the text is a clause."""


def root_of(artifact_uri: str, name: str, version: int, source: str) -> str:
    """The root of a version's artifacts. Raises UnreadableError: they can't be read."""
    scheme, colon, rest = artifact_uri.partition(":")
    if scheme == "mlflow-artifacts" and colon:
        # With a host, it is the server's own by another name.
        path = rest.partition("//")[2].partition("/")[2] if rest.startswith("//") else rest.lstrip("/")
        if not path or not all(map(is_safe, path.split("/"))):
            raise UnreadableError(f"its artifact is at '{artifact_uri}', which is no path of artifacts")
        return f"{_ARTIFACTS}{path}"
    if scheme in ("s3", "gs") and rest.startswith("//"):
        # The URI is written by those who register models. Requests with the operator's credentials go only to
        # the stores that the operator has chosen.
        try:
            endpoint = parse_location(artifact_uri).endpoint
        except InvalidArgumentError as error:
            raise UnreadableError(f"its artifact is at '{artifact_uri}': {error.message}") from None
        if endpoint:
            raise UnreadableError(
                f"its artifact is at '{artifact_uri}', which names the server '{endpoint}'; only the "
                f"operator may name one, by AWS_ENDPOINT_URL: register it as s3://bucket/path"
            )
        return artifact_uri.rstrip("/")
    model_id = source.removeprefix("models:/")
    if model_id == source or not is_safe(model_id) or not model_id.startswith("m-"):
        raise UnreadableError(
            f"its artifact is at '{artifact_uri}', which can't be read from here; start the MLflow server "
            f"with --serve-artifacts and --artifacts-destination, and log the model again"
        )
    return f"{_VERSION}{quote(name, safe='')}/{version}/{model_id}"


def generated(digest: str, size: int) -> StoredObject:
    """A file that conch has made."""
    return StoredObject(f"{_GENERATED}{digest}", size, digest, 0)


def _target(path: str) -> str:
    """Path and query of a request for a file."""
    if path.startswith(_ARTIFACTS):
        return f"{_PROXY}/{quote(path.removeprefix(_ARTIFACTS))}"
    name, version, _, file = path.removeprefix(_VERSION).split("/", 3)
    query = urlencode({"name": unquote(name), "version": version, "path": file})
    return f"model-versions/get-artifact?{query}"


async def open_registry(
    location: MlflowLocation,
    credentials: MlflowCredentials,
    silence_s: float,
    generated_files: Mapping[str, bytes],
    stores: CredentialReader,
) -> RegistryStore:
    """Opens a registry, without a request."""
    headers = {"Authorization": credentials.authorization} if credentials.authorization else {}
    context = await asyncio.to_thread(credentials.tls) if location.secure else None
    http = RegistryHttp(location, headers, context, silence_s)
    return RegistryStore(http, generated_files, stores, silence_s)
