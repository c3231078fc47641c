"""The server's side of one living worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from conch.core.backend import Outcome
from conch.core.calls import ServerCalls
from conch.core.errors import ConchError
from conch.core.instances.placement import Placement
from conch.core.readiness import Readiness
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec
from conch.workers.channel import Channel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that a worker runs.

    Attributes:
        since_ns: Monotonic time at which it was sent.
        request_ids: The ids that clients gave its requests.
    """

    since_ns: int
    request_ids: tuple[str, ...]


class Link:
    """A worker process, as the server talks to it; its process is somebody else's.

    Args:
        channel: The socket to it, made with ``patient=False``; the link closes it.
        name: The instance's name.
        spec: The model version.
        calls: What the model may ask of the server.
        on_lost: Called once, on the link's own thread, with the reason, when the worker can't be used any
            more and everything it had has been answered; not where it was asked to close.

    Attributes:
        readiness: Asks the model's `is_ready`; None where it has none, and before it is loaded.
    """

    readiness: Readiness | None = None

    def __init__(
        self,
        channel: Channel,
        name: str,
        spec: ModelSpec,
        calls: ServerCalls,
        on_lost: Callable[[str], None],
    ) -> None:
        raise NotImplementedError

    def load(self, placement: Placement, on_loaded: Callable[[ConchError | None], None]) -> None:
        """Has the worker load the model.

        Args:
            placement: Where the instance lives.
            on_loaded: Called once, on the link's thread or on the one that calls: with None when the model
                is ready, with the error if it can't be loaded or the worker is lost meanwhile.
        """
        raise NotImplementedError

    def begin(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Sends a batch; see `BackendInstance.begin`. On a lost link it is done at once, with an error."""
        raise NotImplementedError

    def in_flight(self) -> list[InFlight]:
        """The batches that the worker runs, the oldest first."""
        raise NotImplementedError

    def close(self, timeout_s: float) -> bool:
        """Asks the worker to finalize its model and to end, and waits for that.

        Returns:
            Whether it did so in time; if not, its process has to be killed. The link is closed either way.
        """
        raise NotImplementedError

    def lose(self, reason: str) -> None:
        """Gives the worker up: everything that it has is answered with an error. May be called twice."""
        raise NotImplementedError
