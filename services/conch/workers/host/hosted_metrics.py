"""Custom metrics in a worker; the server keeps them, shared by all models."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from conch.core.custom_metrics import Change, CustomFamilies, CustomFamily, CustomMetric, Kind
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError
from conch.ipc.channel import Kind as Message

_FORGET = b'{"do":"forget"}'
_MOST_CHANGES = 500
"""Changes in one message; a packet has a few hundred KiB."""


class MetricServer(Protocol):
    """The connection to the server, as metrics use it."""

    def query(self, kind: str, /, **fields: object) -> dict[str, object]:
        """Sends a query and waits for its result."""

    def notify(self, kind: Message, subject: int, fields: bytes) -> None:
        """Sends a message."""


class RemoteFamilies(CustomFamilies):
    """The server's families of custom metrics.

    Attributes:
        forgotten: Numbers of references that the model has dropped, for `flush`.
    """

    def __init__(self, server: MetricServer) -> None:
        super().__init__()
        self._server = server
        self._numbers = itertools.count(1)
        self.forgotten: deque[int] = deque()

    def flush(self) -> None:
        """Sends the references that the model has dropped."""
        while self.forgotten:
            try:
                number = self.forgotten.popleft()
            except IndexError:
                return  # another thread was faster
            self._server.notify(Message.METRIC, number, _FORGET)

    def family(self, name: str, kind: Kind, description: str) -> CustomFamily:
        """See `CustomFamilies.family`; the server decides."""
        self.flush()
        number = self.number()
        self._server.query("family", number=number, name=name, kind=kind, description=description)
        family = RemoteFamily(name, kind, description, self._server, number, self)
        self.watch(family, number)
        return family

    def update(self, changes: Iterable[tuple[CustomMetric, Change]]) -> None:
        """See `CustomFamilies.update`; sends one message for many changes."""
        self.flush()
        packed = [metric.packed(change) for metric, change in changes if isinstance(metric, RemoteMetric)]
        for start in range(0, len(packed), _MOST_CHANGES):
            _notify(self._server, 0, {"do": "update", "changes": packed[start : start + _MOST_CHANGES]})

    def number(self) -> int:
        """Next free number."""
        return next(self._numbers)

    def watch(self, thing: object, number: int) -> None:
        """Lets `flush` report the end of an object; a finalizer runs anywhere, so it must not send."""
        weakref.finalize(thing, self.forgotten.append, number).atexit = False


class RemoteFamily(CustomFamily):
    """A family in the server."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        description: str,
        server: MetricServer,
        number: int,
        families: RemoteFamilies,
    ) -> None:
        super().__init__(name, kind, description)
        self._server = server
        self._number = number
        self._families = families

    def metric(self, labels: Mapping[str, str], bounds: Sequence[float] | None = None) -> CustomMetric:
        """See `CustomFamily.metric`."""
        number = self._families.number()
        limits = None if bounds is None else [bound for bound in bounds if bound != math.inf]
        self._server.query("metric", number=number, family=self._number, labels=dict(labels), bounds=limits)
        metric = RemoteMetric(self, labels, limits or (), self._server, number)
        self._families.watch(metric, number)
        return metric


class RemoteMetric(CustomMetric):
    """A metric in the server; validates changes before they are sent."""

    def __init__(
        self,
        family: RemoteFamily,
        labels: Mapping[str, str],
        bounds: Sequence[float],
        server: MetricServer,
        number: int,
    ) -> None:
        super().__init__(family, labels, bounds)
        self._server = server
        self._number = number

    @property
    def value(self) -> float:
        """Value of a counter or gauge, with the changes of all models."""
        value = self._server.query("value", number=self._number)["value"]
        assert isinstance(value, float | int), "the server sends numbers"
        return float(value)

    def increment(self, by: float) -> None:
        """See `CustomMetric.increment`."""
        super().increment(by)
        self._send_change("increment", by)

    def set(self, value: float) -> None:
        """See `CustomMetric.set`."""
        super().set(value)
        self._send_change("set", value)

    def observe(self, value: float) -> None:
        """See `CustomMetric.observe`."""
        self._check("Observe", "histogram")
        self._send_change("observe", value)

    def packed(self, change: Change) -> list[object]:
        """A change for a message, validated."""
        if isinstance(change, tuple):
            super().merge(*change)
        elif self._family.kind == "gauge":
            super().set(change)
        else:
            super().increment(change)
        return [self._number, change]

    def merge(self, counts: Sequence[int], total: float) -> None:
        """See `CustomMetric.merge`."""
        _notify(self._server, 0, {"do": "update", "changes": [self.packed((counts, total))]})

    def _send_change(self, what: str, value: float) -> None:
        _notify(self._server, self._number, {"do": what, "value": value})


def _notify(server: MetricServer, number: int, fields: dict[str, object]) -> None:
    try:
        server.notify(Message.METRIC, number, codec.encode_json(fields))
    except ChannelClosedError:
        pass  # the server has closed the socket
