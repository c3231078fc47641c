"""The messages of one watch stream: start, events, staging progress, end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import InvalidArgumentError, OutOfRangeError, UnavailableError
from conch.protocol import model_control_pb2 as pb
from conch_control.agent_api import AgentApi, ModelStatus
from conch_control.remote_api.messages import event_message, index_message, status_message
from conch_control.version_phase import Phase

STOPPED = "Server exiting"
"""Error text of changes and watches when the server stops."""

_LEAST_INTERVAL_MS = 100
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


class Watch:
    """Messages of one watch stream, as an iterable.

    `given_up` turns True when the client is gone or the service stops; `EventLog.wake` must follow. `allows`
    tells whether the client may see a model.

    Raises:
        InvalidArgumentError: The request contradicts itself.
    """

    def __init__(
        self,
        agent: AgentApi,
        request: pb.WatchRequest,
        given_up: Callable[[], bool],
        clock: Clock = monotonic_ns,
        allows: Callable[[str], bool] = lambda model: True,
    ) -> None:
        self._allows = allows
        if request.WhichOneof("start") == "whole_state" and not request.whole_state:
            raise InvalidArgumentError("'whole_state' must be true, or absent to begin elsewhere")
        self._agent = agent
        self._log = agent.events
        self._request = request
        self._given_up = given_up
        self._clock = clock
        self._models = frozenset(request.models)
        self._revision = 0
        interval_ms = request.progress_interval_ms
        self._interval_ns = max(interval_ms, _LEAST_INTERVAL_MS) * _NS_PER_MS if interval_ms else None
        self._staging: set[tuple[str, int]] = set()
        self._progress: dict[str, ModelStatus] = {}
        self._next_progress_ns = 0
        self._draining = False  # as last sent

    def __iter__(self) -> Iterator[pb.WatchResponse]:
        """Yields messages and waits between them.

        Raises:
            OutOfRangeError: Requested events are lost.
            UnavailableError: The server stops.
        """
        yield self._begin()
        while True:
            events = self._log.after(self._revision, self._timeout_s(), self._interrupted)
            if events:
                self._revision = events[-1].revision
            wanted = [event for event in events if self._includes(event.model)]
            self._track_staging((event.model, event.version, event.phase) for event in wanted)
            progress = self._changed_progress()
            if wanted or progress or self._agent.draining != self._draining:
                yield self._message(events=map(event_message, wanted), progress=map(status_message, progress))
            if self._given_up() or (self._log.closed and not events):
                raise UnavailableError(STOPPED)

    def _begin(self) -> pb.WatchResponse:
        request, log = self._request, self._log
        start = request.WhichOneof("start")
        if start == "whole_state":
            index = self._agent.models()
            self._revision = index.revision
            models = tuple(model for model in index.models if self._includes(model.name))
            self._track_staging(
                (model.name, version.version, version.phase) for model in models for version in model.versions
            )
            return self._message(state=index_message(replace(index, models=models)))
        if start is None:
            self._revision = log.revision
            return self._message()
        if request.after.epoch != log.epoch:
            raise OutOfRangeError(
                f"epoch '{request.after.epoch}' is not that of this server, '{log.epoch}', which has been "
                "started since; begin again with the whole state"
            )
        self._revision = request.after.revision
        log.after(self._revision)  # raises at once if they are lost
        return self._message()

    def _message(
        self,
        state: pb.ModelIndex | None = None,
        events: Iterable[pb.Event] = (),
        progress: Iterable[pb.ModelStatus] = (),
    ) -> pb.WatchResponse:
        self._draining = self._agent.draining
        return pb.WatchResponse(
            epoch=self._log.epoch,
            revision=self._revision,
            state=state,
            events=events,
            progress=progress,
            draining=self._draining,
        )

    def _interrupted(self) -> bool:
        return self._given_up() or self._agent.draining != self._draining

    def _includes(self, model: str) -> bool:
        return (not self._models or model in self._models) and self._allows(model)

    def _track_staging(self, phases: Iterable[tuple[str, int, Phase]]) -> None:
        if self._interval_ns is None:
            return
        for model, version, phase in phases:
            if phase is Phase.STAGING:
                self._staging.add((model, version))
            else:
                self._staging.discard((model, version))

    def _timeout_s(self) -> float | None:
        if not self._staging:
            return None
        return max(self._next_progress_ns - self._clock(), 0) / _NS_PER_S

    def _changed_progress(self) -> list[ModelStatus]:
        """Models whose staging has progressed since the last message."""
        now = self._clock()
        if self._interval_ns is None or not self._staging or now < self._next_progress_ns:
            return []
        self._next_progress_ns = now + self._interval_ns
        staging = {model for model, _ in self._staging if self._allows(model)}
        found = {model.name: model for model in self._agent.progress(staging)}
        changed = [status for name, status in found.items() if self._progress.get(name) != status]
        self._progress = found
        return changed
