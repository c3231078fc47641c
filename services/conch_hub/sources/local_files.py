"""A GGUF file or a folder on this machine; its files are linked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conch_engines.llama_cpp.llama_file import all_parts
from conch_hub.source import Listing, PullError, RemoteFile


class LocalSource:
    """Files of this machine; a `Source`.

    Args:
        path: A file or a folder.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path if path.is_dir() else path.parent
        self._only = None if path.is_dir() else all_parts(path)

    def listing(self) -> Listing:
        """The file with its other parts and its sampling parameters, or the files of the folder."""
        found = self._folder.iterdir() if self._only is None else [*self._only]
        try:
            files = [
                RemoteFile(each.name, each.stat().st_size) for each in found if each.is_file() or self._only
            ]
        except OSError as error:
            raise PullError(f"'{error.filename}' can't be read: {error.strerror}") from None
        return Listing(sorted(files, key=lambda each: each.path))

    def fetch(self, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
        """Links a file."""
        target.symlink_to((self._folder / file.path).resolve())
        progress(file.size)
