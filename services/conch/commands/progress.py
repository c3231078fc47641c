"""How far a load is, shown while it goes on."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from typing import TextIO

from conch.commands.show import staged
from conch.core.errors import ConchError
from conch_control.lifecycle.version_phase import Phase
from conch_control.remote_api.client import ModelControlClient, Update, Watching

_EVERY_MS = 500
_BEGIN_S = 5.0
_ERASE = "\r\x1b[K"


class Progress:
    """Shows what a watch tells of one model, from when it is entered until it is left.

    On a terminal it is one line that changes; else each change is a line.

    Args:
        client: The server.
        model: The model.
        out: Where it is shown.
    """

    def __init__(self, client: ModelControlClient, model: str, out: TextIO) -> None:
        self._client = client
        self._model = model
        self._out = out
        self._terminal = out.isatty()
        self._last = ""
        self._begun = threading.Event()
        self._watching: Watching | None = None
        self._thread = threading.Thread(target=self._show, name="conch-progress")

    def __enter__(self) -> Progress:
        self._watching = self._client.watch(models=[self._model], progress_ms=_EVERY_MS)
        self._thread.start()
        # What happens before the watch has begun would not be shown. Without one the load is as good.
        self._begun.wait(_BEGIN_S)
        return self

    def __exit__(self, *error: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._thread.join()
        if self._terminal and self._last:
            self._out.write(_ERASE)
            self._out.flush()

    def _show(self) -> None:
        assert self._watching is not None
        try:
            # What goes wrong here goes wrong for the load too, which says so; or only progress is lacking.
            with suppress(ConchError, OSError):
                for update in self._watching:
                    self._begun.set()
                    for line in lines(update):
                        self._write(line)
        finally:
            self._begun.set()

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
    """What a message of the watch tells, a line each."""
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
