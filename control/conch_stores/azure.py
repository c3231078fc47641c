"""Azure Blob Storage, through Microsoft's client. Runs on the event loop of `Connection`.

Not through adlfs, which hides missing containers, loses placeholders of empty directories, and keeps each
file system alive until the process ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    IncompleteReadError,
    ResourceNotFoundError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.storage.blob.aio import BlobServiceClient, ContainerClient

from conch_stores.credentials import AzureCredentials, Credentials
from conch_stores.locations import Location
from conch_stores.stores import StoreBusyError, StoredObject

_PASSING = (ServiceRequestError, ServiceResponseError, IncompleteReadError, TimeoutError)


class AzureStore:
    """A prefix of a container; a `Store`."""

    def __init__(
        self, service: BlobServiceClient, container: ContainerClient, prefix: str, identity: Any
    ) -> None:
        self._service = service
        self._container = container
        self._prefix = prefix
        self._identity = identity

    async def list(self, prefix: str) -> list[StoredObject]:
        """All objects under a prefix, with directory placeholders."""
        found = []
        with _errors():
            blobs = self._container.list_blobs(
                name_starts_with=f"{self._prefix}{prefix}" or None, include=["metadata"]
            )
            async for blob in blobs:
                found.append(_stored(blob, blob.name[len(self._prefix) :]))
        return found

    async def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes of an object."""
        with _errors():
            stream = await self._container.download_blob(
                f"{self._prefix}{path}", offset=start, length=end - start, max_concurrency=1
            )
            content: bytes = await stream.readall()
        return content

    async def close(self) -> None:
        """Closes the connections."""
        await self._container.close()
        await self._service.close()
        if self._identity is not None:
            await self._identity.close()


async def open_store(location: Location, credentials: Credentials, silence_s: float) -> AzureStore:
    """Opens a container."""
    assert isinstance(credentials, AzureCredentials)
    settings: dict[str, Any] = {
        "retry_total": 0,  # `Connection` retries, with a time limit
        "connection_timeout": silence_s,
        "read_timeout": silence_s,
    }
    identity = None
    with _errors():
        if credentials.connection_string:
            service = BlobServiceClient.from_connection_string(credentials.connection_string, **settings)
            if service.account_name != location.account:
                raise OSError(f"AZURE_STORAGE_CONNECTION_STRING is for account '{service.account_name}'")
        else:
            identity = _identity(credentials)
            service = BlobServiceClient(
                f"https://{location.account}.blob.core.windows.net",
                credential=_key(location, credentials) if identity is None else identity,
                **settings,
            )
        container = service.get_container_client(location.bucket)
    return AzureStore(service, container, location.prefix, identity)


def _key(location: Location, credentials: AzureCredentials) -> Any:
    if not credentials.key:
        return None  # anonymous access
    return {"account_name": location.account, "account_key": credentials.key}


def _identity(credentials: AzureCredentials) -> Any:
    if not credentials.auth_type:
        return None
    from azure.identity.aio import DefaultAzureCredential, ManagedIdentityCredential

    if credentials.auth_type == "managed_identity":
        return ManagedIdentityCredential(client_id=credentials.client_id or None)
    return DefaultAzureCredential(managed_identity_client_id=credentials.client_id or None)


def _stored(blob: Any, path: str) -> StoredObject:
    metadata = {name.lower(): value for name, value in (blob.metadata or {}).items()}
    if metadata.get("hdi_isfolder") == "true" and not path.endswith("/"):
        path += "/"  # a directory of a hierarchical namespace
    md5 = blob.content_settings.content_md5
    changed = blob.last_modified
    return StoredObject(
        path,
        int(blob.size or 0),
        str(blob.etag or "").strip('"'),
        0 if changed is None else int(changed.timestamp() * 1e9),
        bytes(md5).hex() if md5 else "",
    )


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ResourceNotFoundError as error:
        raise FileNotFoundError(_text(error)) from None
    except ClientAuthenticationError as error:
        raise PermissionError(_text(error)) from None
    except _PASSING as error:
        raise StoreBusyError(_text(error)) from None
    except HttpResponseError as error:
        status = error.status_code or 0
        if status == 429 or status >= 500:
            raise StoreBusyError(f"the store answered {status}: {_text(error)}") from None
        if status == 403:
            raise PermissionError(_text(error)) from None
        raise OSError(_text(error)) from None
    except (AzureError, ValueError) as error:
        raise OSError(_text(error)) from None


def _text(error: Exception) -> str:
    """First line of an error; the rest repeats the request and the response."""
    message = str(getattr(error, "message", "") or error or type(error).__name__)
    return message.splitlines()[0] if message else type(error).__name__
