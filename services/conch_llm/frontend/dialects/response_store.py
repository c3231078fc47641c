"""Keeps finished responses in memory, so that further requests can go on with their conversations.

Threads and locks: one for all ports and loops; a lock guards what is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

_OF_AN_ENTRY = 512  # bytes that an entry counts besides its texts


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response.

    Attributes:
        owner: The principal that has asked; empty without an access policy.
        asked: The conversation up to the answer, as JSON of a list of chat messages.
        answered: The answer's messages, in the same form.
        response: The response as the client has it.
    """

    owner: str
    asked: bytes
    answered: bytes
    response: bytes

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return _OF_AN_ENTRY + len(self.asked) + len(self.answered) + len(self.response)


class ResponseStore:
    """Responses by their ids; those that were longest not used go first.

    Args:
        most_bytes: Bytes of all of them; 0 keeps none.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        """True if it keeps any."""
        return self._most_bytes > 0

    def put(self, response_id: str, stored: StoredResponse) -> bool:
        """Keeps a response; false if it alone is too large."""
        if stored.size > self._most_bytes:
            return False
        with self._lock:
            self._kept[response_id] = stored
            self._bytes += stored.size
            while self._bytes > self._most_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.size
        return True

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """A response of this owner; None if it is not kept."""
        with self._lock:
            found = self._kept.get(response_id)
            if found is None or found.owner != owner:
                return None
            self._kept.move_to_end(response_id)
            return found

    def remove(self, response_id: str, owner: str) -> bool:
        """Drops a response of this owner; false if it is not kept."""
        with self._lock:
            found = self._kept.get(response_id)
            if found is None or found.owner != owner:
                return False
            self._bytes -= self._kept.pop(response_id).size
            return True
