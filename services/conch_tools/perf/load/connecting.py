"""Opens connections on threads, so that a load goes on while a server takes its time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from conch_tools.perf.load.calls import Client

_MOST = 16
"""Connections that are being opened at the same time."""


class Connector:
    """Opens the connections of places.

    Args:
        connect: Opens one, on any thread. Raises OSError.
    """

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._places: set[int] = set()
        self._opened: list[tuple[int, Client | OSError]] = []
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """A descriptor that can be read once there is something to take."""
        return self._wake

    def begin(self, place: int) -> None:
        """Begins to open a place's connection, unless that is under way, or enough others are."""
        if place in self._places or len(self._places) >= _MOST:
            return
        self._places.add(place)
        threading.Thread(target=self._open, args=(place,), name="connect", daemon=True).start()

    def take(self) -> list[tuple[int, Client | OSError]]:
        """Takes the opened connections, and errors of others, by place."""
        with self._lock:
            found, self._opened = self._opened, []
            if found:
                os.eventfd_read(self._wake)
        self._places.difference_update(place for place, _ in found)
        return found

    def close(self) -> None:
        """Closes what is not taken; threads that still wait for a server close theirs."""
        with self._lock:
            self._closed = True
            os.close(self._wake)
            opened, self._opened = self._opened, []
        for _, client in opened:
            if not isinstance(client, OSError):
                client.close()

    def _open(self, place: int) -> None:
        found: Client | OSError
        try:
            found = self._connect()
        except OSError as error:
            found = error
        with self._lock:
            if not self._closed:
                self._opened.append((place, found))
                os.eventfd_write(self._wake, 1)
                return
        if not isinstance(found, OSError):
            found.close()
