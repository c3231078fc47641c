"""Servers that speak the protocols of object stores, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.support.servers import eventually, free_port
from tests.support.waiting import PATIENCE_S

AZURE_ACCOUNT = "devstoreaccount1"
# Azurite's own, which is public: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_EMULATORS = Path(os.environ.get("CONCH_EMULATORS") or Path.home() / ".cache" / "conch-emulators")
_AZURITE = _EMULATORS / "node_modules" / ".bin" / "azurite-blob"
_MOTO = """
import sys
from moto.server import main

main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


# Any identity may make objects, but not change them.
_SOMEBODY = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=somebody/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}


class Bucket(Protocol):
    """A bucket that a test fills."""

    name: str

    def put(self, path: str, content: bytes) -> None:
        """Uploads an object."""

    def delete(self, path: str) -> None:
        """Removes an object."""


class Emulator(Protocol):
    """A running server.

    Attributes:
        port: Port on which it listens.
    """

    port: int

    def bucket(self, name: str) -> Bucket:
        """Makes a bucket."""

    def location(self, bucket: str, path: str = "", port: int | None = None) -> str:
        """The URL of a place in it, perhaps through a proxy."""

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Variables that the location needs."""


def put_tree(bucket: Bucket, directory: Path, prefix: str = "") -> None:
    """Uploads a directory."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            bucket.put(f"{prefix}{path.relative_to(directory).as_posix()}", path.read_bytes())


def _ask(
    method: str, url: str, content: bytes | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    request = urllib.request.Request(url, content, dict(headers or {}), method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        body: bytes = answer.read()
    return body


def _answers(url: str) -> bool:
    try:
        _ask("GET", url)
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    return True


@contextmanager
def _running(command: list[str], url: str, environment: dict[str, str] | None = None) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="conch-emulator-") as directory:
        with Path(directory, "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env={**os.environ, **(environment or {})},
            )
        try:
            eventually(lambda: _answers(url) or process.poll() is not None, f"{command[0]} listens")
            assert process.poll() is None, Path(directory, "log").read_text()
            yield
        finally:
            process.kill()
            process.wait()


class _Bucket:
    """A bucket of S3 or Google's store, filled over plain HTTP: the emulators check no signatures."""

    def __init__(self, name: str, objects: str, upload: str) -> None:
        self.name = name
        self._objects = objects
        self._upload = upload

    def put(self, path: str, content: bytes) -> None:
        """Uploads an object."""
        method = "POST" if "uploadType" in self._upload else "PUT"
        url = self._upload.format(self._quoted(path))
        headers = {**_SOMEBODY, "Content-Type": "application/octet-stream"}
        _ask(method, url, content, headers)

    def delete(self, path: str) -> None:
        """Removes an object."""
        _ask("DELETE", self._objects.format(self._quoted(path)), headers=_SOMEBODY)

    def _quoted(self, path: str) -> str:
        return urllib.parse.quote(path, safe="" if "storage/v1" in self._objects else "/")


class S3Emulator:
    """Moto's server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def bucket(self, name: str) -> Bucket:
        """Makes a bucket."""
        base = f"http://127.0.0.1:{self.port}/{name}"
        _ask("PUT", base)
        return _Bucket(name, f"{base}/{{}}", f"{base}/{{}}")

    def location(self, bucket: str, path: str = "", port: int | None = None) -> str:
        """The URL of a place in it."""
        return f"s3://127.0.0.1:{port or self.port}/{bucket}/{path}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Variables that the location needs."""
        return {
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "hush-hush",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class GcsEmulator:
    """A small server with Google's JSON API."""

    def __init__(self, port: int) -> None:
        self.port = port

    def bucket(self, name: str) -> Bucket:
        """Makes a bucket."""
        base = f"http://127.0.0.1:{self.port}"
        body = json.dumps({"name": name}).encode()
        _ask("POST", f"{base}/storage/v1/b?project=test", body, {"Content-Type": "application/json"})
        upload = f"{base}/upload/storage/v1/b/{name}/o?uploadType=media&name={{}}"
        return _Bucket(name, f"{base}/storage/v1/b/{name}/o/{{}}", upload)

    def location(self, bucket: str, path: str = "", port: int | None = None) -> str:
        """The URL of a place in it."""
        return f"gs://{bucket}/{path}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Variables that the location needs."""
        return {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port or self.port}"}


class _Container:
    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self.name = name

    def put(self, path: str, content: bytes) -> None:
        """Uploads an object."""
        with self._client() as service:
            service.get_blob_client(self.name, path).upload_blob(content, overwrite=True)

    def delete(self, path: str) -> None:
        """Removes an object."""
        with self._client() as service:
            service.get_blob_client(self.name, path).delete_blob()


class AzureEmulator:
    """Azurite."""

    def __init__(self, port: int) -> None:
        self.port = port

    def bucket(self, name: str) -> Bucket:
        """Makes a container."""
        with self._client() as service:
            service.create_container(name)
        return _Container(self._client, name)

    def location(self, bucket: str, path: str = "", port: int | None = None) -> str:
        """The URL of a place in it."""
        return f"as://{AZURE_ACCOUNT}/{bucket}/{path}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Variables that the location needs."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self._connection_string(port)}

    def _connection_string(self, port: int | None = None) -> str:
        endpoint = f"http://127.0.0.1:{port or self.port}/{AZURE_ACCOUNT}"
        return (
            f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
            f"BlobEndpoint={endpoint};"
        )

    def _client(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self._connection_string())


@contextmanager
def s3_emulator() -> Iterator[S3Emulator]:
    """Moto's server for one block."""
    pytest.importorskip("moto", reason="the emulator of S3 is in the extra `test`")
    pytest.importorskip("s3fs", reason="s3:// needs the extra `s3`")
    port = free_port()
    with _running([sys.executable, "-c", _MOTO, str(port)], f"http://127.0.0.1:{port}/moto-api/"):
        yield S3Emulator(port)


@contextmanager
def gcs_emulator() -> Iterator[GcsEmulator]:
    """An emulator of Google's store for one block."""
    pytest.importorskip("gcp_storage_emulator", reason="the emulator of GCS is in the extra `test`")
    pytest.importorskip("gcsfs", reason="gs:// needs the extra `gcs`")
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "gcp_storage_emulator",
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        "--in-memory",
    ]
    with _running(command, f"http://127.0.0.1:{port}/storage/v1/b?project=test"):
        yield GcsEmulator(port)


@contextmanager
def azure_emulator() -> Iterator[AzureEmulator]:
    """Azurite for one block."""
    pytest.importorskip("azure.storage.blob", reason="as:// needs the extra `azure`")
    if not _AZURITE.exists():
        pytest.skip(f"Azurite is not installed in {_EMULATORS}; run tests/setup_emulators.sh")
    port = free_port()
    command = [
        str(_AZURITE),
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--silent",
        "--disableTelemetry",
        f"--blobPort={port}",
    ]
    with _running(command, f"http://127.0.0.1:{port}/"):
        yield AzureEmulator(port)
