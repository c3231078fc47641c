"""Metrics that a worker's model defines: they are kept by the server, for all models that name them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from conch.core.custom_metrics import CustomFamilies, CustomFamily, CustomMetric, Kind
from conch.workers.connection.packet_channel import ChannelClosedError
from conch.workers.protocol import wire
from conch.workers.protocol.wire import Kind as Message

_FORGET = b'{"do":"forget"}'


class Server(Protocol):
    """What metrics need of the server."""

    def ask(self, question: str, **more: object) -> dict[str, object]:
        """Asks it something, and waits for the answer."""

    def tell(self, kind: Message, subject: int, fields: bytes) -> None:
        """Tells it something."""


class RemoteFamilies(CustomFamilies):
    """The server's families.

    Args:
        server: The server.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._numbers = itertools.count(1)
        self._forgotten: deque[int] = deque()

    def flush(self) -> None:
        """Tells the server what the model has let go of."""
        while self._forgotten:
            try:
                number = self._forgotten.popleft()
            except IndexError:
                return  # another thread was faster
            self._server.tell(Message.METRIC, number, _FORGET)

    def family(self, name: str, kind: Kind, description: str) -> CustomFamily:
        """See `CustomFamilies.family`; the server says whether there can be one."""
        self.flush()
        number = self.number()
        self._server.ask("family", number=number, name=name, kind=kind, description=description)
        family = RemoteFamily(name, kind, description, self._server, number, self)
        self.watch(family, number)
        return family

    def number(self) -> int:
        """A number for something new."""
        return next(self._numbers)

    def watch(self, thing: object, number: int) -> None:
        """Has `flush` tell the server when something is gone: that may be anywhere, so not then."""
        weakref.finalize(thing, self._forgotten.append, number).atexit = False


class RemoteFamily(CustomFamily):
    """A family of the server's."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        description: str,
        server: Server,
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
        limits = None if bounds is None else list(bounds)
        self._server.ask("metric", number=number, family=self._number, labels=dict(labels), bounds=limits)
        metric = RemoteMetric(self, labels, self._server, number)
        self._families.watch(metric, number)
        return metric


class RemoteMetric(CustomMetric):
    """A metric of the server's; what can't be done with it is found out here."""

    def __init__(self, family: RemoteFamily, labels: Mapping[str, str], server: Server, number: int) -> None:
        super().__init__(family, labels, ())
        self._server = server
        self._number = number

    @property
    def value(self) -> float:
        """The value of a counter or a gauge, all models' changes included."""
        value = self._server.ask("value", number=self._number)["value"]
        assert isinstance(value, float | int), "the server sends numbers"
        return float(value)

    def increment(self, by: float) -> None:
        """See `CustomMetric.increment`."""
        super().increment(by)
        self._tell("increment", by)

    def set(self, value: float) -> None:
        """See `CustomMetric.set`."""
        super().set(value)
        self._tell("set", value)

    def observe(self, value: float) -> None:
        """See `CustomMetric.observe`."""
        self._check("Observe", "histogram")
        self._tell("observe", value)

    def _tell(self, what: str, value: float) -> None:
        try:
            self._server.tell(Message.METRIC, self._number, wire.encode_json({"do": what, "value": value}))
        except ChannelClosedError:
            pass  # nobody asks for it any more
