"""The interface of response caches.

A cache is found by name through the entry-point group ``conch.caches``; an entry points to a function that
makes a `ResponseCache` of the settings on the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from conch.core.tensor import Buffer


class ResponseCache(ABC):
    """Stores entries, which are bytes, by key; all methods may be called from several threads at once.

    Attributes:
        blocking: True if calls wait for something outside this process, such as a network. They are then made
            on threads of their own, and an exception means that the cache is out of order for now.
        shared: True if other servers, or this one after a restart, see the entries. Keys then identify models
            by their files; else by each load.
        ttl_ns: Lifetime of entries, for models without one of their own, in nanoseconds; 0 for no limit.
        connections: With `blocking`, number of calls at the same time.
        patience_ns: With `blocking`, how long a request may wait for a thread.
    """

    blocking: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    ttl_ns: int = 0
    connections: int = 1
    patience_ns: int = 100_000_000

    @abstractmethod
    def lookup(self, key: bytes) -> Buffer | None:
        """The valid entry of a key, or None."""

    @abstractmethod
    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        """Stores an entry, in place of an older one of the key.

        Args:
            key: A digest.
            entry: The entry.
            ttl_ns: Its lifetime in nanoseconds; 0 for no limit.

        Returns:
            True if there was room for it.
        """

    def close(self) -> None:
        """Frees resources; called once, after the last use."""
