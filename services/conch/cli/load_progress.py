"""Shows the progress of `conch models load`. Threads: `conch-progress` reads the watch stream."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from typing import TextIO

from conch.cli.models_output import staged
from conch.core.errors import ConchError
from conch_control.remote_api.client import ModelControlClient, Update, WatchCall
from conch_control.version_phase import Phase

_EVERY_MS = 500
_OPEN_TIMEOUT_S = 5.0
_ERASE = "\r\x1b[K"


class Progress:
    """Shows the events of one model while entered: one changing line on a terminal, else a line each."""

    def __init__(self, client: ModelControlClient, model: str, out: TextIO) -> None:
        self._client = client
        self._model = model
        self._out = out
        self._terminal = out.isatty()
        self._last = ""
        self._opened = threading.Event()
        self._stream: WatchCall | None = None
        self._thread = threading.Thread(target=self._show, name="conch-progress")

    def __enter__(self) -> Progress:
        self._stream = self._client.watch(models=[self._model], progress_ms=_EVERY_MS)
        self._thread.start()
        # Events before the stream opens would not be shown; the load works without a stream too.
        self._opened.wait(_OPEN_TIMEOUT_S)
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._thread.join()
        if self._terminal and self._last:
            self._out.write(_ERASE)
            self._out.flush()

    def _show(self) -> None:
        assert self._stream is not None
        try:
            # The load itself reports its errors; here only the progress is missing.
            with suppress(ConchError, OSError):
                for update in self._stream:
                    self._opened.set()
                    for line in lines(update):
                        self._write(line)
        finally:
            self._opened.set()

    def _write(self, line: str) -> None:
        if line == self._last:
            return
        self._last = line
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(_ERASE + line[:width])
        else:
            self._out.write(line + "\n")
        self._out.flush()


def lines(update: Update) -> list[str]:
    """The events and progress in a message of the watch stream, a line each."""
    found = []
    for event in update.events:
        version = f" {event.version}" if event.version else ""
        reason = f": {' '.join(event.reason.split())}" if event.reason else ""
        found.append(f"{event.model}{version} {event.phase.value}{reason}")
    for model in update.progress:
        found.extend(
            f"{model.name} {version.version} {version.phase.value} {staged(version)}"
            for version in model.versions
            if version.phase is Phase.STAGING and staged(version)
        )
    return found
