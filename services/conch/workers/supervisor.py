"""One instance of a model in a process of its own: started, watched, and started again when it dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from conch.backends.python.settings import Settings
from conch.core.backend import Awaited, BackendInstance, Outcome
from conch.core.calls import ServerCalls
from conch.core.custom_metrics import current_families
from conch.core.errors import ConchError, DeadlineExceededError, UnavailableError, as_conch_error
from conch.core.instances.placement import Placement
from conch.core.readiness import Readiness
from conch.core.request import InferenceResponse
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec
from conch.core.stopping import load_stopped
from conch.core.workers import WorkerStatus
from conch.workers.answers import OpenRequest
from conch.workers.blocks import IDLE_NS
from conch.workers.channel import Channel
from conch.workers.environments import Environment
from conch.workers.hangs import HangDetector
from conch.workers.inflight import InFlight
from conch.workers.link import Link
from conch.workers.lives import Life, Phase
from conch.workers.monitor import Monitor, Timer
from conch.workers.process import start_worker
from conch.workers.reports import crash_report, crashed, in_flight_error, not_healthy, sentence
from conch.workers.team import Again, Member, Team
from conch.workers.waiting import WorkerWaiter

log = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""How long a model's `finalize` may take."""

_END_S = 5.0
"""How long a worker may take to end once it has finalized its model."""

_GRACE_S = 0.2
"""A process whose socket is closed has usually ended; if not, it is killed after so long."""

_LOOK_S = 0.1
"""How often a start looks whether it is still wanted."""

_NO_THREAD_NS = 1_000_000_000
"""When to try again to start a thread."""

_NS_PER_MS = 1_000_000

_WELL = "exited with status 0"

_ABORT_NS = 1_000_000_000
"""A process that does not end when it is aborted is killed after so long."""


class WorkerInstance(BackendInstance):
    """An instance whose model runs in a worker process; `open` it.

    Args:
        spec: The model version.
        placement: Where the instance lives.
        settings: How it runs.
        environment: What its processes are started in.
        calls: What the model may ask of the server.
        monitor: Starts and watches its processes.
        team: The instances of its model version.
    """

    begins: ClassVar[bool] = True

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        settings: Settings,
        environment: Environment,
        calls: ServerCalls,
        monitor: Monitor,
        team: Team,
    ) -> None:
        self._spec = spec
        self._placement = placement
        self._name = placement.name
        self._settings = settings
        self._environment = environment
        self._calls = calls
        self._waiter = WorkerWaiter(calls, self._name, spec)
        self._families = current_families()  # of the server that loads the model
        self._monitor = monitor
        self._team = team
        self._life = Life()
        self._member = Member(self._life, placement.passive, self._set_readiness)
        # All of these are changed under the team's lock.
        self._link: Link | None = None  # that of a worker which serves
        self._attempt: _Attempt | None = None
        self._timer: Timer | None = None
        self._tidying: Timer | None = None
        self._thread: threading.Thread | None = None
        self._start_ns = 0
        self._closed = False
        limit_s = settings.max_execution_s
        self._hangs = None if limit_s is None else HangDetector(monitor, limit_s, self._hung)
        self._hung_numbers: set[int] = set()
        self._warm_up: Callable[[BackendInstance], None] | None = None

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        placement: Placement,
        settings: Settings,
        environment: Environment,
        calls: ServerCalls,
        monitor: Monitor,
        team: Team,
    ) -> WorkerInstance:
        """Makes an instance and has its first worker load the model; the arguments are those of the class.

        Raises:
            ConchError: The worker could not be started, or what the model raised, or how the worker died.
        """
        instance = cls(spec, placement, settings, environment, calls, monitor, team)
        monitor.hold()
        calls.waiters.add(instance._waiter)
        instance._waiter.opening = True
        try:
            instance._serve(instance._start())
        except BaseException:
            calls.waiters.discard(instance._waiter)
            monitor.release()
            raise
        instance._waiter.opening = False
        team.join(instance._member)
        return instance

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch and waits for it; see `BackendInstance.execute`."""
        return _wait_for(self, batch)

    def begin(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Sends a batch to the worker; see `BackendInstance.begin`."""
        link = self._link
        if link is None:
            done(self._refusal())
            return
        link.begin(batch, done if self._hangs is None else self._watched(self._hangs, link, batch, done))

    def begin_here(self, batch: Batch, done: Callable[[Outcome], None]) -> Awaited | None:
        """See `BackendInstance.begin_here`."""
        link = self._link
        if link is None:
            done(self._refusal())
            return None
        return link.begin_here(
            batch, done if self._hangs is None else self._watched(self._hangs, link, batch, done)
        )

    def available(self, again: Again) -> bool:
        """False while requests had better wait for the worker; see `BackendInstance.available`."""
        if self._link is not None:
            return True
        with self._team.lock:
            if self._link is not None or self._team.hopeless or self._closed:
                return True
            self._member.again.append(again)
            return False

    def warm_again(self, warm_up: Callable[[BackendInstance], None]) -> None:
        """Has each further worker be warmed up before it serves; see `BackendInstance.warm_again`."""
        self._warm_up = warm_up

    def worker(self) -> WorkerStatus:
        """What its worker is in; see `BackendInstance.worker`."""
        with self._team.lock:
            life, attempt = self._life, self._attempt
            pid = None if attempt is None or attempt.process.how else attempt.process.pid
            return WorkerStatus(life.phase.value, life.restarts, pid, life.reason)

    def close(self) -> None:
        """Has the worker finalize the model and end, kills it if it does not, and waits for its end."""
        with self._team.lock:
            serving = self._life.phase is Phase.SERVING
            self._life.close()
            self._closed = True
            link, self._link = self._link, None
            attempt, thread, timers = self._attempt, self._thread, (self._timer, self._tidying)
        self._team.leave(self._member)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        if attempt is not None:
            ended = serving and link is not None and link.close(_CLOSE_S)
            if not ended:
                if serving:
                    log.error(
                        "worker of '%s' (pid %d) did not finalize its model in time and is killed",
                        self._name,
                        attempt.process.pid,
                    )
                attempt.process.kill()
            if not attempt.process.wait(_END_S):
                attempt.process.kill()
                attempt.process.wait()
            attempt.link.lose("it is closed")
            if ended and attempt.process.how != _WELL:
                log.error("%s", attempt.report())
        if thread is not None:
            thread.join()
        if self._hangs is not None:
            self._hangs.close()
        self._calls.waiters.discard(self._waiter)
        self._monitor.release()

    # --- starting ------------------------------------------------------------------------------------------

    def _start(self) -> _Attempt:
        """Starts a worker and has it load the model.

        Raises:
            ConchError: See `open`; nothing is left of the worker.
        """
        start_ns = self._monitor.clock()
        attempt = _Attempt(self)
        with self._team.lock:
            closed = self._closed
            self._attempt = attempt
        try:
            if closed:
                raise UnavailableError(not_healthy(self._name))
            attempt.load(self._settings.start_timeout_s)
            if self._warm_up is not None:
                self._warm_up(_Loaded(self, attempt))
        except BaseException:
            attempt.end()
            raise
        self._start_ns = self._monitor.clock() - start_ns
        return attempt

    def _serve(self, attempt: _Attempt) -> None:
        """Has a worker that has loaded the model serve."""
        with self._team.lock:
            if self._closed:
                return  # `close` sees to the worker
            self._life.served(self._monitor.clock())
            self._member.check = attempt.link.readiness
            self._link = attempt.link
            again, self._member.again = self._member.again, []
            lost = attempt.over
        self._tidy_later(attempt.link)
        self._team.changed()
        for call in again:
            call()
        if lost:  # it died between the two
            self._lost(attempt)

    def _tidy_later(self, link: Link) -> None:
        """Has memory that is idle given back once in a while, for as long as a worker serves."""
        with self._team.lock:
            if self._link is link:
                time_ns = self._monitor.clock() + IDLE_NS
                self._tidying = self._monitor.at(time_ns, partial(self._tidy, link))

    def _tidy(self, link: Link) -> None:
        link.tidy()
        self._tidy_later(link)

    def _retry(self) -> None:
        """One more try, on a thread of its own."""
        with self._team.lock:
            if self._life.phase is not Phase.WAITING:
                return
            self._life.begin()
            number = self._life.restarts
        self._team.changed()
        try:
            attempt = self._start()
        except BaseException as error:
            reason = as_conch_error(error).message
            with self._team.lock:
                if self._closed:
                    return
                self._life.failed(self._monitor.clock(), reason)
            log.error(
                "worker of '%s' can't be started again, the next try is in %.1f s: %s",
                *(self._name, self._life.wait_ns / 1e9, reason),
            )
            self._wait()
        else:
            log.info(
                "worker of '%s' serves again (pid %d, restart %d)", self._name, attempt.process.pid, number
            )
            self._serve(attempt)

    def _wait(self) -> None:
        """Has the next try begin when it is time, once the instance is waiting."""
        with self._team.lock:
            if self._life.phase is not Phase.WAITING:
                return
            self._timer = self._monitor.at(self._life.try_ns, partial(self._run, self._retry))
        self._team.changed()

    def _run(self, step: Callable[[], None]) -> None:
        """Runs a step on a thread of its own: starting and answering take time, the monitor has none."""
        with self._team.lock:
            if self._closed:
                return
            before = self._thread

            def run() -> None:
                if before is not None:
                    before.join()  # it is about to end: it has made this step's timer, if it did that at all
                step()

            thread = threading.Thread(target=run, name=f"conch-{self._name}-restart", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many
                log.error("worker of '%s' can't be started again yet: %s", self._name, error)
                again_ns = self._monitor.clock() + _NO_THREAD_NS
                self._timer = self._monitor.at(again_ns, partial(self._run, step))
            else:
                self._thread = thread

    # --- dying ---------------------------------------------------------------------------------------------

    def _losing(self, attempt: _Attempt) -> int:
        """A worker can't be used any more; returns in how many ms another try of its requests makes sense."""
        with self._team.lock:
            if self._life.phase is Phase.SERVING and self._attempt is attempt:
                # From here on requests wait for the next one, and those that it has are answered.
                self._link, self._member.check = None, None
                self._life.lost(self._monitor.clock(), "")
            return max((self._life.next_wait_ns + self._start_ns) // _NS_PER_MS, 1)

    def _lost(self, attempt: _Attempt) -> None:
        """A worker has ended, and everything that it had has been answered; on any thread."""
        self._losing(attempt)
        with self._team.lock:
            if self._life.phase is not Phase.LOST or self._attempt is not attempt:
                return
            self._life.ended(self._monitor.clock(), attempt.how)
        log.error("%s", attempt.report())
        self._wait()

    def _refusal(self) -> UnavailableError:
        with self._team.lock:
            waits = self._life.phase is Phase.WAITING
            left_ns = max(self._life.try_ns - self._monitor.clock(), 0) if waits else 0
            reason = self._life.reason
        when = f"The next try to start it is in {left_ns / 1e9:.1f} s." if waits else ""
        return in_flight_error(self._name, f"{reason} {when}", (left_ns + self._start_ns) // _NS_PER_MS)

    # --- hanging -------------------------------------------------------------------------------------------

    def _watched(
        self, hangs: HangDetector, link: Link, batch: Batch, done: Callable[[Outcome], None]
    ) -> Callable[[Outcome], None]:
        return _Watched(hangs, link, batch, done, self._hung_error)

    def _hung_error(self, number: int) -> ConchError | None:
        """What those are told whose execution has hung; None where it has not."""
        if number not in self._hung_numbers:
            return None
        return DeadlineExceededError(
            f"Failed to process the request(s) for model instance '{self._name}', message: "
            f"{self._hang_text()}"
        )

    def _hung(self, number: int) -> None:
        """An execution has taken too long; on the monitor's thread."""
        with self._team.lock:
            attempt = self._attempt
            if attempt is None or self._life.phase not in (Phase.SERVING, Phase.STARTING):
                return
            self._hung_numbers.add(number)
        attempt.abort(self._hang_text())

    def _hang_text(self) -> str:
        return (
            f"the execution lasted longer than the {self._settings.max_execution_s:g} s that "
            f"'CONCH_MAX_EXECUTION_SECONDS' allows, so its process was killed"
        )

    def _set_readiness(self, readiness: Readiness | None) -> None:
        self.readiness = readiness


def _wait_for(instance: BackendInstance, batch: Batch) -> Sequence[InferenceResponse | None] | None:
    """Runs a batch on an instance with `begins`, and waits for it."""
    outcomes: list[Outcome] = []
    over = threading.Event()

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        over.set()

    instance.begin(batch, done)
    over.wait()
    outcome = outcomes[0]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class _Loaded(BackendInstance):
    """A worker that has loaded the model again, and does not serve yet.

    Args:
        instance: Whose it is.
        attempt: The worker.
    """

    begins: ClassVar[bool] = True

    def __init__(self, instance: WorkerInstance, attempt: _Attempt) -> None:
        self._instance = instance
        self._link = attempt.link

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        """Runs a batch and waits for it."""
        return _wait_for(self, batch)

    def begin(self, batch: Batch, done: Callable[[Outcome], None]) -> None:
        """Sends a batch to the worker."""
        instance, link = self._instance, self._link
        hangs = instance._hangs
        link.begin(batch, done if hangs is None else instance._watched(hangs, link, batch, done))


class _Watched:
    """Takes the outcome of a batch that must not last too long; a coroutine lasts until it has answered all.

    Args:
        hangs: Notices when it does.
        link: The worker.
        batch: The batch.
        done: Takes the outcome.
        error: The error for an execution of this number, if it has hung.
    """

    def __init__(
        self,
        hangs: HangDetector,
        link: Link,
        batch: Batch,
        done: Callable[[Outcome], None],
        error: Callable[[int], ConchError | None],
    ) -> None:
        self._hangs = hangs
        self._link = link
        self._batch = batch
        self._done = done
        self._error = error
        self._left: set[int] = set()
        self._number = hangs.begin()

    def __call__(self, outcome: Outcome) -> None:
        """Takes the outcome."""
        link = self._link
        if isinstance(outcome, BaseException):
            outcome = self._error(self._number) or outcome
        elif link.concurrent and (kept := link.kept(self._batch)):
            self._left.update(entry.number for entry in kept)
            for entry in kept:
                entry.watched = self
        if not self._left or link.lost:
            self._hangs.end(self._number)
        self._done(outcome)

    def ended(self, entry: OpenRequest) -> None:
        """See `Watch`."""
        self._left.discard(entry.number)
        if not self._left:
            self._hangs.end(self._number)

    def lost(self, entry: OpenRequest, error: ConchError) -> ConchError:
        """See `Watch`."""
        self.ended(entry)
        return self._error(self._number) or error


class _Attempt:
    """One process of an instance, from its start to its end.

    Args:
        instance: The instance.

    Attributes:
        over: Whether it has ended and everything that it had has been answered.
        how: How it ended, with the reason where that is not its own.

    Raises:
        UnavailableError: The process can't be started.
    """

    def __init__(self, instance: WorkerInstance) -> None:
        self._instance = instance
        self._name = instance._name
        self._monitor = instance._monitor
        self.over = False
        self._why = ""
        self._in_flight: list[InFlight] = []
        self._ended_ns = 0
        self._channel: Channel | None = None
        self._loaded = threading.Event()
        self._error: ConchError | None = None
        self.process, sock = start_worker(
            self._monitor, self._name, instance._environment, "serve", self._process_ended
        )
        channel = self._channel = Channel(sock, patient=False)
        if self.process.how:
            channel.shut()
        self.link = Link(
            channel,
            self._name,
            instance._spec,
            instance._calls,
            self._link_lost,
            self._explain,
            instance._families,
            instance._waiter,
        )

    @property
    def how(self) -> str:
        """How it ended, and why where that is not its own doing, in a sentence."""
        return sentence(self.process.how, self._why)

    def load(self, timeout_s: float | None) -> None:
        """Has it load the model.

        Raises:
            ConchError: What the model raised, or how the process ended.
        """
        timer: Timer | None = None
        if timeout_s is not None:
            text = (
                f"it had not loaded the model after the {timeout_s:g} s that 'CONCH_START_TIMEOUT_SECONDS' "
                f"allows"
            )
            end_ns = self._monitor.clock() + round(timeout_s * 1e9)
            timer = self._monitor.at(end_ns, partial(self.abort, text))
        stopped = load_stopped()
        self.link.load(self._instance._placement, self._on_loaded)
        while not self._loaded.wait(_LOOK_S):
            if stopped():
                self._why = "its load was stopped"
                self.process.kill()
                self._loaded.wait()
        if timer is not None:
            timer.cancel()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Ends what is left of it."""
        self.process.kill()
        self.process.wait()
        self.link.lose("it could not be loaded")

    def abort(self, why: str) -> None:
        """Kills it, with its stacks in its report."""
        self._why = self._why or why
        self.process.abort()
        self._monitor.at(self._monitor.clock() + _ABORT_NS, self.process.kill)

    def report(self) -> str:
        """All that is known of its death."""
        ids = [each for batch in self._in_flight for each in batch.request_ids]
        since = min((batch.since_ns for batch in self._in_flight), default=None)
        executing_s = None if since is None else (self._ended_ns - since) / 1e9
        return crash_report(self._name, self.process.pid, self.how, self.process.errors, ids, executing_s)

    def _on_loaded(self, error: ConchError | None) -> None:
        self._error = error
        self._loaded.set()

    def _explain(self, reason: str) -> ConchError:
        """The error for all that the worker has, when its link is lost: waits for how its process ends.

        Args:
            reason: What is wrong with it; empty if its socket has simply ended.
        """
        retry_after_ms = self._instance._losing(self)
        if not reason and not self.process.wait(_GRACE_S):
            reason = "it has closed its socket"
        if reason:
            self._why = self._why or reason
            self.process.kill()
            self.process.wait(_END_S)
        self._ended_ns = self._monitor.clock()
        self._in_flight = self.link.in_flight()
        if not self._loaded.is_set():
            return crashed(self._name, self.how, self.process.errors)
        return in_flight_error(self._name, self.how, retry_after_ms)

    def _process_ended(self) -> None:
        """On the monitor's thread."""
        if self._channel is not None:
            self._channel.shut()  # a child of it may hold the other end open

    def _link_lost(self, reason: str) -> None:
        self.over = True
        self._instance._lost(self)
