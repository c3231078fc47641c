"""The folders of candidates, and the results of earlier runs in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conch_tools.whole_files import write_whole

_RESULT = "result.json"


class CandidateFolders:
    """One folder for each candidate; its ``result.json`` is written last.

    Args:
        path: Directory of the folders.
        source: Digest of the source; folders of others are removed.
        restart: True to remove all folders.
    """

    def __init__(self, path: Path, source: str, restart: bool) -> None:
        self._path, self._source = path, source
        if restart:
            shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)
        self._earlier = dict(self._read())

    def earlier(self, key: str) -> dict[str, Any] | None:
        """The result of an earlier run with a key; None if there is none, or if it was an error."""
        found = self._earlier.get(key)
        # An error may be another one today.
        return None if found is None or found["status"] == "error" else found

    def folder_of(self, candidate: str) -> Path:
        """The folder of a candidate, by its id."""
        return self._path / candidate

    def new(self, name: str, chain: list[str]) -> Path:
        """An empty folder; that of the same chain with other options, files or versions is replaced."""
        numbers = [int(each.name.partition("-")[0]) for each in self._path.iterdir()]
        folder = self._path / f"{max(numbers, default=0) + 1:02}-{name}"
        for key in [key for key, found in self._earlier.items() if found["chain"] == chain]:
            folder = self._path / self._earlier.pop(key)["id"]
            shutil.rmtree(folder)
        folder.mkdir()
        return folder

    def keep(self, result: Mapping[str, Any], key: str) -> None:
        """Writes a result, which a later run finds by its key."""
        whole = {**result, "key": key, "source": self._source}
        write_whole(self._path / result["id"] / _RESULT, json.dumps(whole, indent=1))

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for folder in sorted(self._path.iterdir()):
            try:
                result = json.loads((folder / _RESULT).read_text())
                key, source = result.pop("key"), result.pop("source")
                if source != self._source:
                    raise KeyError(source)
            except (OSError, ValueError, KeyError):
                shutil.rmtree(folder)  # of another source, or of a run that was killed
            else:
                yield key, result
