"""Google Cloud Storage, through gcsfs. Runs on the event loop of `Connection`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import aiohttp
import requests.exceptions
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError, is_retriable
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError

from conch_stores.credentials import Credentials, GcsCredentials
from conch_stores.locations import Location
from conch_stores.stores import StoreBusyError, StoredObject

log = logging.getLogger(__name__)

_PASSING = (aiohttp.ClientError, requests.exceptions.RequestException, TransportError, TimeoutError)


class _OneTry(GCSFileSystem):  # type: ignore[misc]
    """The file system without its own retries, which have no time limit and log tracebacks."""

    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        return await GCSFileSystem._request.__wrapped__(self, *args, **kwargs)


class GcsStore:
    """A prefix of a bucket; a `Store`."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root

    async def list(self, prefix: str) -> list[StoredObject]:
        """All objects under a prefix, with directory placeholders."""
        place = f"{self._root}/{prefix}".rstrip("/")
        with _errors():
            found = await self._fs._find(place, detail=True, update_cache=False)
        start = len(self._root) + 1
        return [_stored(info, name[start:]) for name, info in found.items() if name.startswith(f"{place}/")]

    async def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes of an object."""
        with _errors():
            content: bytes = await self._fs._cat_file(f"{self._root}/{path}", start=start, end=end)
        return content

    async def close(self) -> None:
        """Closes the connections."""
        if self._fs._session is not None:
            await self._fs._session.close()


async def open_store(location: Location, credentials: Credentials, silence_s: float) -> GcsStore:
    """Opens a bucket."""
    assert isinstance(credentials, GcsCredentials)
    with _errors():
        # In a thread: Google's library may query the metadata server.
        fs = await asyncio.to_thread(_file_system, credentials, silence_s)
        fs._loop = asyncio.get_running_loop()
    return GcsStore(fs, f"{location.bucket}/{location.prefix}".rstrip("/"))


def _file_system(credentials: GcsCredentials, silence_s: float) -> Any:
    settings = {
        "access": "read_only",
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
        "requests_timeout": aiohttp.ClientTimeout(sock_connect=silence_s, sock_read=silence_s),
    }
    if credentials.path:
        return _OneTry(token=credentials.path, **settings)
    if not credentials.emulated:
        try:
            return _OneTry(token="google_default", **settings)
        except DefaultCredentialsError:
            log.info("no Google credentials found: reading anonymously")
    return _OneTry(token="anon", **settings)


def _stored(info: dict[str, Any], path: str) -> StoredObject:
    changed = info.get("updated")
    mtime_ns = 0
    if isinstance(changed, str):
        mtime_ns = int(datetime.fromisoformat(changed).timestamp() * 1e9)
    try:
        md5 = base64.b64decode(info.get("md5Hash", "")).hex()
    except (binascii.Error, ValueError):
        md5 = ""
    # The etag changes with metadata too, the generation only with the content.
    identity = str(info.get("generation") or info.get("etag") or "")
    return StoredObject(path, int(info["size"]), identity, mtime_ns, md5)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except HttpError as error:
        if is_retriable(error):
            raise StoreBusyError(f"the store answered {error}") from None
        if error.code in (401, 403):
            raise PermissionError(str(error)) from None
        raise OSError(str(error)) from None
    except _PASSING as error:
        raise StoreBusyError(str(error) or type(error).__name__) from None
    except OSError as error:
        if str(error).startswith("Forbidden"):
            raise PermissionError(str(error)) from None
        raise
    except (GoogleAuthError, ValueError, KeyError, RuntimeError) as error:
        raise OSError(str(error)) from None
