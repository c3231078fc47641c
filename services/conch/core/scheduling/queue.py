"""Queues of the dynamic batcher: order and number of queued requests, and the times at which they expire.

A plain queue is a deque. `PriorityQueue` replaces it if a model's config has priority levels or queue
policies, with the same interface.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

from conch.core.errors import QueueFullError, QueueLimitError
from conch.core.request import InferenceRequest
from conch.core.spec import QueuePolicy

NEVER = 1 << 62
"""A monotonic time that never comes."""

_LEAST_SWEPT = 64


class Expiries:
    """Requests with a time at which they expire.

    Attributes:
        next_ns: Lower bound of all times; too early once a request was discarded.
    """

    __slots__ = ("_count", "_heap", "_numbers", "_requests", "next_ns")

    def __init__(self) -> None:
        self.next_ns = NEVER
        self._count = itertools.count()
        self._heap: list[tuple[int, int]] = []  # times and numbers, also of discarded requests
        self._numbers: dict[InferenceRequest, int] = {}
        self._requests: dict[int, InferenceRequest] = {}

    def add(self, request: InferenceRequest, time_ns: int) -> None:
        """Adds a request."""
        number = self._numbers[request] = next(self._count)
        self._requests[number] = request
        heapq.heappush(self._heap, (time_ns, number))
        self.next_ns = min(self.next_ns, time_ns)

    def discard(self, request: InferenceRequest) -> None:
        """Discards a request, if it is known."""
        number = self._numbers.pop(request, None)
        if number is None:
            return
        requests = self._requests
        del requests[number]
        if len(self._heap) > 2 * len(requests) + _LEAST_SWEPT:
            self._heap = [each for each in self._heap if each[1] in requests]
            heapq.heapify(self._heap)

    def take(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out the expired requests, earliest first."""
        taken: list[InferenceRequest] = []
        heap, requests = self._heap, self._requests
        while heap and (heap[0][0] <= now_ns or heap[0][1] not in requests):
            request = requests.pop(heapq.heappop(heap)[1], None)
            if request is not None:
                del self._numbers[request]
                taken.append(request)
        self.next_ns = heap[0][0] if heap else NEVER
        return taken


def bound_of(max_queue_size: int) -> int:
    """The size at which a queue is full, for a setting where 0 means never."""
    return max_queue_size or NEVER


def queue_full(request: InferenceRequest, bound: int) -> QueueLimitError:
    """The error for a request beyond the server's own limit."""
    return QueueLimitError(
        f"{request.log_prefix}{bound} requests are waiting, the most the model's queue takes; "
        f"retry after a pause, a longer one each time"
    )


class Queue(Protocol):
    """The interface of a queue, which a deque has."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> InferenceRequest: ...
    def __iter__(self) -> Iterator[InferenceRequest]: ...
    def append(self, request: InferenceRequest, /) -> None:
        """Adds a request in its order."""

    def popleft(self) -> InferenceRequest:
        """Takes the next request out."""

    def extendleft(self, requests: Iterable[InferenceRequest], /) -> None:
        """Puts back the requests taken last, the last one first."""

    def clear(self) -> None:
        """Removes everything."""


class PriorityQueue:
    """Queued requests by priority level, each level with its policy.

    A level's requests come before those of lower levels. Within a level, requests whose timeout has passed
    and that the policy delays come after the others. A rank is twice the level, plus one if delayed.

    Args:
        policies: The policy of each level, highest first.
        default_level: Level of a request without one, or with one that does not exist; counted from 1.
    """

    def __init__(self, policies: tuple[QueuePolicy, ...], default_level: int) -> None:
        self._policies = policies
        self._default = default_level
        # By rank. Ordered dicts, so that any request can be taken out.
        self._queues: list[OrderedDict[InferenceRequest, None]] = [OrderedDict() for _ in policies * 2]
        self._length = 0
        # Of all queued requests, also of those in the forming batch.
        self._ranks: dict[InferenceRequest, int] = {}
        self._waiting = [0] * len(policies)

    def admit(self, request: InferenceRequest) -> QueuePolicy:
        """Gives a request its rank, before it is appended.

        Returns:
            The policy of its level.

        Raises:
            QueueFullError: Its level is full; the text is Triton's.
        """
        level = self._level(request)
        policy = self._policies[level]
        if policy.max_size and self._waiting[level] >= policy.max_size:
            raise QueueFullError(f"{request.log_prefix}Exceeds maximum queue size")
        self._ranks[request] = 2 * level
        self._waiting[level] += 1
        return policy

    def leave(self, request: InferenceRequest) -> None:
        """Removes a request, in the queue or taken out of it."""
        rank = self._ranks.pop(request)
        self._waiting[rank // 2] -= 1
        self._remove(request, rank)

    def delays(self, request: InferenceRequest) -> bool:
        """True if the policy delays a request whose timeout has passed, instead of rejecting it."""
        return self._policies[self._ranks[request] // 2].delays

    def delay(self, request: InferenceRequest) -> None:
        """Moves a queued request behind all others of its level."""
        rank = self._ranks[request]
        self._remove(request, rank)
        self._ranks[request] = rank + 1
        self.append(request)

    def precedes(self, request: InferenceRequest, other: InferenceRequest) -> bool:
        """True if a request precedes another one by its level or delay, even if it came later."""
        return self._ranks[request] < self._ranks[other]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> InferenceRequest:
        assert index == 0, "only the head can be looked at"
        return next(iter(self._head()))

    def __iter__(self) -> Iterator[InferenceRequest]:
        return chain.from_iterable(self._queues)

    def append(self, request: InferenceRequest, /) -> None:
        """Adds a request that has a rank."""
        self._queues[self._ranks[request]][request] = None
        self._length += 1

    def popleft(self) -> InferenceRequest:
        """Takes the next request out; it keeps its rank."""
        request, _ = self._head().popitem(last=False)
        self._length -= 1
        return request

    def extendleft(self, requests: Iterable[InferenceRequest], /) -> None:
        """Puts requests back at the head of their rank, the last one first."""
        for request in requests:
            queue = self._queues[self._ranks[request]]
            queue[request] = None
            queue.move_to_end(request, last=False)
            self._length += 1

    def clear(self) -> None:
        """Nothing to do: there are no empty places."""

    def _head(self) -> OrderedDict[InferenceRequest, None]:
        return next(queue for queue in self._queues if queue)

    def _level(self, request: InferenceRequest) -> int:
        level = request.priority
        return (level if 1 <= level <= len(self._policies) else self._default) - 1

    def _remove(self, request: InferenceRequest, rank: int) -> None:
        if self._queues[rank].pop(request, self) is None:
            self._length -= 1
