"""The worker of one instance: started, watched, and started again when it dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from conch.core.errors import UnavailableError, as_conch_error
from conch.core.servable import Readiness, WorkerStatus
from conch.workers.connection.worker_connection import Link
from conch.workers.protocol.blocks import IDLE_NS
from conch.workers.supervision.crash_report import in_flight_error, not_healthy
from conch.workers.supervision.process_monitor import Timer
from conch.workers.supervision.restart_policy import Life, Phase
from conch.workers.supervision.watchdog import ExecutionLimit
from conch.workers.supervision.worker_group import Again, Member, Team
from conch.workers.supervision.worker_process import Attempt, Launch

log = logging.getLogger(__name__)

_NO_THREAD_NS = 1_000_000_000
"""When to try again to start a thread."""

_NS_PER_MS = 1_000_000


class Supervisor:
    """Has a worker serve an instance, one process after the other; `open` it.

    Args:
        launch: What the processes are started with.
        team: The instances of the model version.
        tell: Called with the instance's readiness whenever that may have changed.

    Attributes:
        link: The worker that serves; None while there is none.
        limit: How long its executions may last; None for as long as they like.
        warm_up: Has a further worker run what it has to before it serves; raises if that fails.
    """

    def __init__(self, launch: Launch, team: Team, tell: Callable[[Readiness | None], None]) -> None:
        self._launch = launch
        self._name = launch.name
        self._monitor = launch.monitor
        self._team = team
        self._life = Life()
        self._member = Member(self._life, launch.placement.passive, tell)
        # All of these are changed under the team's lock.
        self.link: Link | None = None
        self._attempt: Attempt | None = None
        self._timer: Timer | None = None
        self._tidying: Timer | None = None
        self._thread: threading.Thread | None = None
        self._start_ns = 0
        self._closed = False
        limit_s = launch.settings.max_execution_s
        self.limit = (
            None if limit_s is None else ExecutionLimit(self._monitor, self._name, limit_s, self._executing)
        )
        self.warm_up: Callable[[Link], None] | None = None

    def open(self) -> None:
        """Has the first worker load the model, and serve.

        Raises:
            ConchError: The worker could not be started, or what the model raised, or how the worker died.
        """
        calls, waiter = self._launch.calls, self._launch.waiter
        self._monitor.hold()
        calls.waiters.add(waiter)
        waiter.opening = True
        try:
            self._serve(self._start())
        except BaseException:
            calls.waiters.discard(waiter)
            self._monitor.release()
            raise
        waiter.opening = False
        self._team.join(self._member)

    def await_worker(self, again: Again) -> bool:
        """Has somebody be told when requests need not wait for a worker any more.

        Args:
            again: Called then.

        Returns:
            Whether they had better wait; if not, nobody will be told.
        """
        with self._team.lock:
            if self.link is not None or self._team.hopeless or self._closed:
                return False
            self._member.again.append(again)
            return True

    def refusal(self) -> UnavailableError:
        """What batches are told that no worker can be given."""
        with self._team.lock:
            waits = self._life.phase is Phase.WAITING
            left_ns = max(self._life.try_ns - self._monitor.clock(), 0) if waits else 0
            reason = self._life.reason
        when = f"The next try to start it is in {left_ns / 1e9:.1f} s." if waits else ""
        return in_flight_error(self._name, f"{reason} {when}", (left_ns + self._start_ns) // _NS_PER_MS)

    def status(self) -> WorkerStatus:
        """What the worker is in."""
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
            self.link = None
            attempt, thread, timers = self._attempt, self._thread, (self._timer, self._tidying)
        self._team.leave(self._member)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        if attempt is not None:
            attempt.close(serving)
        if thread is not None:
            thread.join()
        if self.limit is not None:
            self.limit.close()
        self._launch.calls.waiters.discard(self._launch.waiter)
        self._monitor.release()

    # --- starting ------------------------------------------------------------------------------------------

    def _start(self) -> Attempt:
        """Starts a worker and has it load the model.

        Raises:
            ConchError: See `open`; nothing is left of the worker.
        """
        start_ns = self._monitor.clock()
        attempt = Attempt(self._launch, self)
        with self._team.lock:
            closed = self._closed
            self._attempt = attempt
        try:
            if closed:
                raise UnavailableError(not_healthy(self._name))
            attempt.load(self._launch.settings.start_timeout_s)
            if self.warm_up is not None:
                self.warm_up(attempt.link)
        except BaseException:
            attempt.end()
            raise
        self._start_ns = self._monitor.clock() - start_ns
        return attempt

    def _serve(self, attempt: Attempt) -> None:
        """Has a worker that has loaded the model serve."""
        with self._team.lock:
            if self._closed:
                return  # `close` sees to the worker
            self._life.served(self._monitor.clock())
            self._member.check = attempt.link.readiness
            self.link = attempt.link
            again, self._member.again = self._member.again, []
            lost = attempt.over
        self._tidy_later(attempt.link)
        self._team.changed()
        for call in again:
            call()
        if lost:  # it died between the two
            self.lost(attempt)

    def _tidy_later(self, link: Link) -> None:
        """Has memory that is idle given back once in a while, for as long as a worker serves."""
        with self._team.lock:
            if self.link is link:
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

    def losing(self, attempt: Attempt) -> int:
        """See `Owner.losing`."""
        with self._team.lock:
            if self._life.phase is Phase.SERVING and self._attempt is attempt:
                # From here on requests wait for the next one, and those that it has are answered.
                self.link, self._member.check = None, None
                self._life.lost(self._monitor.clock(), "")
            return max((self._life.next_wait_ns + self._start_ns) // _NS_PER_MS, 1)

    def lost(self, attempt: Attempt) -> None:
        """See `Owner.lost`."""
        self.losing(attempt)
        with self._team.lock:
            if self._life.phase is not Phase.LOST or self._attempt is not attempt:
                return
            self._life.ended(self._monitor.clock(), attempt.how)
        log.error("%s", attempt.report())
        self._wait()

    def _executing(self) -> Attempt | None:
        """The process that is to be killed if an execution in it hangs; None where it ends in any case."""
        with self._team.lock:
            return self._attempt if self._life.phase in (Phase.SERVING, Phase.STARTING) else None
