"""A repository of a hub that speaks Hugging Face's API.

The library ``huggingface_hub`` knows the hub's address, the token and the cache (``HF_ENDPOINT``,
``HF_TOKEN``, ``HF_HOME``). Files are fetched by `Downloader`: the library's own way begins again after an
interruption, and compares no SHA-256.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    close_session,
    constants,
    errors,
    get_token,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)

from conch_hub.download import Download, Downloader
from conch_hub.http_client import HttpClient
from conch_hub.source import Listing, PullError, RemoteFile, link_or_copy

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,96}/[A-Za-z0-9_.-]{1,96}")
_MOST_FILES = 10_000
_TIMEOUT_S = 60.0


class HubSource:
    """One revision of a repository; a `Source`.

    Args:
        repository: ``organisation/name``.
        revision: Branch, tag or commit; empty for ``main``.
        client: Sends the requests for files.
    """

    def __init__(self, repository: str, revision: str, client: HttpClient) -> None:
        if not _NAME.fullmatch(repository):
            raise PullError(f"'{repository}' is no model of a hub: write ORGANISATION/NAME")
        self._repository, self._revision, self._client = repository, revision, client
        self._commit = ""

    def listing(self) -> Listing:
        """Asks the hub for the files of the revision, which is a commit from then on."""
        try:
            self._client.origin(constants.ENDPOINT)
        except PullError as error:
            raise PullError(f"HF_ENDPOINT: {error}") from None
        if constants.HF_HUB_OFFLINE:
            return self._cached()
        where = f"the hub has no '{self._repository}'"
        try:
            found = HfApi(library_name="conch").model_info(
                self._repository, revision=self._revision or None, files_metadata=True, timeout=_TIMEOUT_S
            )
        except errors.GatedRepoError:
            raise PullError(
                f"'{self._repository}' is only for those that have agreed to its terms: do so on its page, "
                f"and set HF_TOKEN to a token of yours"
            ) from None
        except errors.RevisionNotFoundError:
            raise PullError(
                f"{where} with the revision '{self._revision}': --revision names another"
            ) from None
        except errors.RepositoryNotFoundError:
            raise PullError(f"{where}, or it is private: is the name right, and is HF_TOKEN set?") from None
        except Exception as error:
            # Boundary: the library and its HTTP client, whose errors have no common class.
            text = str(error).strip().partition("\n")[0] or type(error).__name__
            raise PullError(
                f"{constants.ENDPOINT} can't list '{self._repository}': {text}; HF_ENDPOINT names another hub"
            ) from None
        finally:
            close_session()  # it is the process's, and kept open otherwise
        self._commit = str(found.sha or self._revision or "main")
        siblings = found.siblings or ()
        if len(siblings) > _MOST_FILES:
            raise PullError(f"'{self._repository}' has more than {_MOST_FILES} files, which is no model")
        return Listing([_file(each) for each in siblings])

    def _cached(self) -> Listing:
        """The files of the revision that the library's cache has."""
        try:
            folder = Path(
                snapshot_download(self._repository, revision=self._revision or None, local_files_only=True)
            )
        except errors.LocalEntryNotFoundError:
            raise PullError(
                f"HF_HUB_OFFLINE is set, and the cache has no '{self._repository}' of that revision"
            ) from None
        self._commit = folder.name
        paths = sorted(each for each in folder.rglob("*") if each.is_file())
        return Listing([RemoteFile(str(each.relative_to(folder)), each.stat().st_size) for each in paths])

    def fetch(self, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
        """Fetches a file, or links the one that the library's cache has."""
        cached = try_to_load_from_cache(self._repository, file.path, revision=self._commit)
        if isinstance(cached, str) and Path(cached).stat().st_size == file.size:
            link_or_copy(Path(cached), target)
            progress(file.size)
            return
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        secrets = {} if token is None else {"Authorization": f"Bearer {token}"}
        url = hf_hub_url(self._repository, file.path, revision=self._commit)
        wanted = Download(url, file.size, file.sha256, secrets=secrets)
        Downloader(self._client).fetch(wanted, target, progress)


def _file(sibling: Any) -> RemoteFile:
    """A file of the hub's answer."""
    lfs = sibling.lfs
    sha256 = str(getattr(lfs, "sha256", "") or "").lower()
    if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise PullError(f"the hub tells a SHA-256 for '{sibling.rfilename}' that is none")
    return RemoteFile(str(sibling.rfilename), int(sibling.size or 0), sha256, str(sibling.blob_id or ""))
