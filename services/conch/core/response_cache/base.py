"""The interface of everything that can keep responses.

A cache is found by name through the entry-point group ``conch.caches``; an entry points to a function that
makes a `ResponseCache` of the settings on the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from conch.core.tensor import Buffer


class ResponseCache(ABC):
    """Keeps entries, which are bytes, by key; all methods may be called from several threads at once.

    Attributes:
        blocking: Whether calls wait for something other than this process, such as a network. They are then
            made on threads kept for them, and an exception means that the cache is out of order for now.
        shared: Whether other servers, or this one after a restart, see the entries. Keys then tell models
            apart by their files; else by each load of them.
        ttl_ns: How long entries of models that say nothing about it are valid; 0 for any time.
        connections: With `blocking`, how many calls it takes at the same time.
        patience_ns: With `blocking`, how long a request may wait for the cache to have time for it.
    """

    blocking: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    ttl_ns: int = 0
    connections: int = 1
    patience_ns: int = 100_000_000

    @abstractmethod
    def lookup(self, key: bytes) -> Buffer | None:
        """The entry of a key; None if there is none, or none that is still valid."""

    @abstractmethod
    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        """Keeps an entry, in place of what the key had.

        Args:
            key: A digest.
            entry: What to keep.
            ttl_ns: How long it is valid, in nanoseconds; 0 for any time.

        Returns:
            Whether there was room for it.
        """

    def close(self) -> None:
        """Frees what the cache holds; called once, when nothing uses it any more."""
