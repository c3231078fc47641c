"""A server with the part of MLflow's REST API that a registry is read by; answers as MLflow 3.17's."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from tests.support.faulty_proxy import FaultyProxy, faulty_proxy
from tests.support.waiting import PATIENCE_S

from conch_control.control_options import StorageOptions
from conch_control.repository.repository_kinds import open_repository
from conch_mlflow.mlflow_options import MlflowSettings
from conch_mlflow.mlflow_repository import MlflowRepository

_API = "/api/2.0/mlflow/"
_PROXY = "/api/2.0/mlflow-artifacts/artifacts"
_stamps = itertools.count(1_795_825_000_000, 1000)
_ids = itertools.count(1)


@dataclass
class Version:
    """A model version, and the files of its artifact."""

    number: int
    files: dict[str, bytes]
    status: str = "READY"
    stage: str = "None"
    tags: dict[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: next(_stamps))
    id: str = field(default_factory=lambda: f"m-{next(_ids):032x}")


@dataclass
class Model:
    """A registered model."""

    versions: dict[int, Version] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: next(_stamps))


class RefusedError(Exception):
    """Refusal of a request."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error_code": code, "message": message}


class FakeRegistry:
    """The server; what a test changes is served at once.

    Attributes:
        models: The registered models by name.
        most: Entries of a page, at most.
        authorization: The header that requests need; empty for none.
        elsewhere: URI of where artifacts lie, if the server does not hand them out.
        ranges: True if it knows ranges.
    """

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.port = 0
        self.most = 1000
        self.authorization = ""
        self.elsewhere = ""
        self.ranges = True

    def register(self, name: str, files: Mapping[str, bytes], *aliases: str, **more: Any) -> Version:
        """Adds the next version of a model, and moves aliases to it."""
        model = self.models.setdefault(name, Model())
        version = Version(max(model.versions, default=0) + 1, dict(files), **more)
        model.versions[version.number] = version
        model.aliases.update(dict.fromkeys(aliases, version.number))
        return version

    def delete(self, name: str, number: int) -> None:
        """Removes a version, and aliases of it."""
        model = self.models[name]
        del model.versions[number]
        model.aliases = {alias: each for alias, each in model.aliases.items() if each != number}

    def answer(self, path: str, query: Mapping[str, str]) -> Any:
        """JSON for a path, or bytes of a file."""
        if path.startswith(f"{_PROXY}/"):
            version_id, _, file = path.removeprefix(f"{_PROXY}/1/models/").partition("/artifacts/")
            return self._file(self._by_id(version_id), file)
        if path == _PROXY:
            found = re.fullmatch(r"1/models/(m-[0-9a-f]+)/artifacts(?:/(.*))?", query["path"])
            assert found, query
            return {"files": _listed(self._by_id(found[1]), found[2] or "", False)}
        if path == "/model-versions/get-artifact":
            return self._file(self._version(query), query["path"])
        method = path.removeprefix(_API)
        if found := re.fullmatch(r"logged-models/(m-[0-9a-f]+)/artifacts/directories", method):
            return {"files": _listed(self._by_id(found[1]), query.get("artifact_directory_path", ""), True)}
        if method == "registered-models/search":
            self._check_page(query)
            return self._page(
                [self._model_json(name) for name in sorted(self.models)], "registered_models", query
            )
        if method == "model-versions/search":
            self._check_page(query)
            return self._page(
                [_version_json(*each) for each in self._matching(query)], "model_versions", query
            )
        if method == "model-versions/get":
            version = self._version(query)
            aliases = [
                a for a, number in self.models[query["name"]].aliases.items() if number == version.number
            ]
            return {"model_version": _version_json(query["name"], version) | {"aliases": aliases}}
        if method == "model-versions/get-download-uri":
            version = self._version(query)
            start = self.elsewhere or "mlflow-artifacts:/1"
            return {"artifact_uri": f"{start}/models/{version.id}/artifacts"}
        raise RefusedError(404, "ENDPOINT_NOT_FOUND", f"no method {method}")

    def _check_page(self, query: Mapping[str, str]) -> None:
        if int(query["max_results"]) > 1000:
            raise RefusedError(400, "INVALID_PARAMETER_VALUE", "Invalid value for parameter 'max_results'")

    def _page(self, entries: list[Any], key: str, query: Mapping[str, str]) -> dict[str, Any]:
        start = int(query.get("page_token", "0"))
        end = start + min(int(query["max_results"]), self.most)
        page: dict[str, Any] = {key: entries[start:end]} if entries[start:end] else {}
        return page | ({"next_page_token": str(end)} if end < len(entries) else {})

    def _matching(self, query: Mapping[str, str]) -> list[tuple[str, Version]]:
        text = query["filter"]
        if found := re.fullmatch(r"tags\.`([^`]+)` = '([^']*)'", text):
            return [
                (name, version)
                for name, model in self.models.items()
                for version in model.versions.values()
                if version.tags.get(found[1]) == found[2]
            ]
        found = re.fullmatch("name=(['\"])(.*)\\1", text)
        assert found, text
        assert query["order_by"] == "version_number DESC"
        return [(found[2], each) for _, each in sorted(self.models[found[2]].versions.items(), reverse=True)]

    def _model_json(self, name: str) -> dict[str, Any]:
        model = self.models[name]
        newest = {each.stage: each for _, each in sorted(model.versions.items())}
        latest = [_version_json(name, each) for each in newest.values()]
        aliases = [{"alias": alias, "version": str(each)} for alias, each in model.aliases.items()]
        changed = max((each.created for each in model.versions.values()), default=model.created)
        return {
            "name": name,
            "creation_timestamp": model.created,
            "last_updated_timestamp": changed,
            **({"latest_versions": latest} if latest else {}),
            **({"aliases": aliases} if aliases else {}),
            **({"tags": _tags(model.tags)} if model.tags else {}),
        }

    def _version(self, query: Mapping[str, str]) -> Version:
        name, number = query["name"], int(query["version"])
        if name not in self.models or number not in self.models[name].versions:
            text = f"Model Version (name={name}, version={number}) not found"
            raise RefusedError(404, "RESOURCE_DOES_NOT_EXIST", text)
        return self.models[name].versions[number]

    def _by_id(self, version_id: str) -> Version:
        for model in self.models.values():
            for version in model.versions.values():
                if version.id == version_id:
                    return version
        raise RefusedError(404, "RESOURCE_DOES_NOT_EXIST", f"no model {version_id}")

    def _file(self, version: Version, path: str) -> bytes:
        if path not in version.files:
            raise RefusedError(404, "RESOURCE_DOES_NOT_EXIST", f"No such artifact: '{path}'")
        return version.files[path]


def _version_json(name: str, version: Version) -> dict[str, Any]:
    return {
        "name": name,
        "version": str(version.number),
        "creation_timestamp": version.created,
        "last_updated_timestamp": version.created,
        "current_stage": version.stage,
        "description": "",
        "source": f"models:/{version.id}",
        "run_id": "19fa1bb0a0614c69b7b245346e42e6e7",
        "status": version.status,
        **({"tags": _tags(version.tags)} if version.tags else {}),
        "run_link": "",
    }


def _tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in tags.items()]


def _listed(version: Version, directory: str, whole_paths: bool) -> list[dict[str, Any]]:
    """One level of an artifact."""
    start = f"{directory}/" if directory else ""
    found: dict[str, dict[str, Any]] = {}
    for path, content in version.files.items():
        if path.startswith(start):
            name, slash, _ = path[len(start) :].partition("/")
            shown = f"{start}{name}" if whole_paths else name
            found[name] = {"path": shown, "is_dir": bool(slash)} | (
                {} if slash else {"file_size": len(content)}
            )
    return list(found.values())


@contextmanager
def running_registry() -> Iterator[FakeRegistry]:
    """A registry on a port of its own."""
    registry = FakeRegistry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # so that head and body leave together

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            try:
                if registry.authorization not in ("", self.headers.get("Authorization")):
                    raise RefusedError(401, "UNAUTHENTICATED", "You are not authenticated.")
                found = registry.answer(unquote(url.path), query)
            except RefusedError as error:
                self._send(
                    error.status, json.dumps(error.body).encode(), {"Content-Type": "application/json"}
                )
                return
            if not isinstance(found, bytes):
                self._send(200, json.dumps(found, indent=2).encode(), {"Content-Type": "application/json"})
                return
            headers = {"ETag": f'"{hash(found)}"'}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            same = self.headers.get("If-Range", headers["ETag"]) == headers["ETag"]
            if wanted is None or not registry.ranges or not same:
                self._send(200, found, headers)
                return
            start, end = int(wanted[1]), int(wanted[2] or len(found) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(found)}"
            self._send(206, found[start : end + 1], headers)

        def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # so that closing waits for them

        def handle_error(self, request: object, client_address: object) -> None:
            """The client has gone."""

    server = Server(("127.0.0.1", 0), Handler)
    registry.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with running_registry() as made:
        yield made


@dataclass
class RegistryPlace:
    """A registry behind a proxy, and a directory for a cache."""

    registry: FakeRegistry
    proxy: FaultyProxy
    cache: Path

    def location(self, query: str = "") -> str:
        """The registry's URL."""
        return f"mlflow+http://127.0.0.1:{self.proxy.port}{query}"

    @contextmanager
    def opened(
        self, query: str = "", timeout_s: float = PATIENCE_S, allow_code: bool = False
    ) -> Iterator[MlflowRepository]:
        """The repository."""
        kinds = {"mlflow": MlflowSettings(allow_code=allow_code)}
        options = StorageOptions(self.cache, 0, timeout_s, kinds=kinds)
        repository = open_repository(self.location(query), options)
        assert isinstance(repository, MlflowRepository)
        with closing(repository):
            yield repository


@pytest.fixture
def place(registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryPlace]:
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    with faulty_proxy(registry.port) as proxy:
        yield RegistryPlace(registry, proxy, tmp_path / "cache")


def mlmodel(flavors: Mapping[str, Any], **more: Any) -> bytes:
    """An MLmodel; JSON is YAML."""
    return json.dumps({"flavors": flavors, "mlflow_version": "3.17.2", **more}).encode()


def triton_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The artifact of a model in Triton's layout."""
    whole = {f"model/{path}": content for path, content in files.items()}
    return {"MLmodel": mlmodel({"triton": {"data": "model"}}), **whole}


def onnx_files(model: bytes = b"onnx") -> dict[str, bytes]:
    """The artifact of an ONNX model, as MLflow logs it."""
    flavors = {
        "onnx": {"data": "model.onnx", "onnx_version": "1.19.0", "providers": ["CPUExecutionProvider"]},
        "python_function": {"data": "model.onnx", "loader_module": "mlflow.onnx"},
    }
    return {"MLmodel": mlmodel(flavors), "model.onnx": model, "requirements.txt": b"mlflow==3.17.2"}
