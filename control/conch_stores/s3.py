"""S3 and compatible servers, through s3fs. Runs on the event loop of `Connection`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiobotocore.session import AioSession
from aiohttp import ClientError as TransportError
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from conch_stores.credentials import Credentials, S3Credentials
from conch_stores.locations import Location
from conch_stores.stores import StoreBusyError, StoredObject

_CONNECTIONS = 32
_PASSING = (HTTPClientError, IncompleteReadError, ResponseParserError, TransportError, TimeoutError)


class S3Store:
    """A prefix of a bucket; a `Store`."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root

    async def list(self, prefix: str) -> list[StoredObject]:
        """All objects under a prefix, with directory placeholders."""
        with _errors():
            found = await self._fs._find(f"{self._root}/{prefix}".rstrip("/"), detail=True)
        start = len(self._root) + 1
        return [_stored(info, name[start:]) for name, info in found.items() if info["type"] == "file"]

    async def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes of an object."""
        with _errors():
            content: bytes = await self._fs._cat_file(f"{self._root}/{path}", start=start, end=end)
        return content

    async def close(self) -> None:
        """Closes the connections."""
        await self._fs._s3creator.__aexit__(None, None, None)


async def open_store(location: Location, credentials: Credentials, silence_s: float) -> S3Store:
    """Opens a bucket."""
    assert isinstance(credentials, S3Credentials)
    with _errors():
        # The session reads files and may query the metadata service.
        session = await asyncio.to_thread(AioSession, profile=credentials.profile or None)
        anonymous = not credentials.key_id and await session.get_credentials() is None
        fs = S3FileSystem(
            anon=anonymous,
            session=session,
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
            **options(location, credentials, silence_s),
        )
        fs.retries = 1  # `Connection` retries, with a time limit
        await fs.set_session()
    return S3Store(fs, f"{location.bucket}/{location.prefix}".rstrip("/"))


def options(location: Location, credentials: S3Credentials, silence_s: float) -> dict[str, Any]:
    """Arguments of s3fs for a location."""
    config: dict[str, Any] = {
        "connect_timeout": silence_s,
        "read_timeout": silence_s,
        "retries": {"max_attempts": 0},
        "max_pool_connections": _CONNECTIONS,
    }
    if location.endpoint:
        config["s3"] = {"addressing_style": "path"}
    client = {"region_name": credentials.region} if credentials.region else {}
    return {
        "key": credentials.key_id or None,
        "secret": credentials.secret or None,
        "token": credentials.session_token or None,
        "endpoint_url": location.endpoint or None,
        "client_kwargs": client,
        "config_kwargs": config,
    }


def _stored(info: dict[str, Any], path: str) -> StoredObject:
    etag = str(info.get("ETag", "")).strip('"')
    changed = info.get("LastModified")
    # Multipart uploads have etags with a dash, which are no MD5.
    md5 = etag if len(etag) == 32 and "-" not in etag else ""
    mtime_ns = 0 if changed is None else int(changed.timestamp() * 1e9)
    return StoredObject(path, int(info["size"]), etag, mtime_ns, md5)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except _PASSING as error:
        raise StoreBusyError(str(error) or type(error).__name__) from None
    except OSError as error:
        cause = error.__cause__
        if isinstance(cause, ClientError):
            status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = cause.response.get("Error", {}).get("Code", "")
            if status == 429 or status >= 500 or code in ("SlowDown", "RequestTimeout"):
                raise StoreBusyError(f"the store answered {status}: {_text(error)}") from None
            raise type(error)(_text(error)) from None
        raise
    except (BotoCoreError, ClientError, ValueError) as error:
        raise OSError(str(error)) from None


def _text(error: OSError) -> str:
    return str(error.strerror or error)
