"""Starts a worker, and restarts it when it dies.

Owns: the current worker process and connection, the restart timer and thread.
Threads and locks: state changes under the group's lock; restarts run on `conch-<instance>-restart`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from conch.core.errors import UnavailableError, as_conch_error
from conch.core.servable import Readiness, WorkerStatus
from conch.ipc.blocks import IDLE_NS
from conch.workers.connection.worker_connection import WorkerConnection
from conch.workers.supervision.crash_report import in_flight_error, not_healthy
from conch.workers.supervision.process_monitor import Timer
from conch.workers.supervision.restart_policy import Phase, RestartPolicy
from conch.workers.supervision.watchdog import ExecutionLimit, LoopWatch
from conch.workers.supervision.worker_group import Member, OnAvailable, WorkerGroup
from conch.workers.supervision.worker_process import Launch, WorkerProcess

log = logging.getLogger(__name__)

_NO_THREAD_NS = 1_000_000_000
"""Wait before the next try to start a thread."""

REPORTED_S = 60.0
"""Silence of a loop that is reported, if `CONCH_HANG_SECONDS` is not set."""

_NS_PER_MS = 1_000_000


class Supervisor:
    """Keeps one worker process serving an instance, or all instances of a version.

    Args:
        launch: Settings of the processes.
        group: The instances of the model version.
        tell: Called with the readiness of its instances after possible changes.
        warm_up: Warms up a worker before it serves; raises on failure.

    Attributes:
        link: The serving worker, or None.
        limit: Its execution limit, or None.
    """

    def __init__(
        self,
        launch: Launch,
        group: WorkerGroup,
        tell: Callable[[Readiness | None], None],
        warm_up: Callable[[WorkerConnection], None],
    ) -> None:
        self._launch = launch
        self._name = launch.name
        self._monitor = launch.monitor
        self._group = group
        self._warm_up = warm_up
        self._policy = RestartPolicy()
        self._member = Member(self._policy, all(each.passive for each in launch.placements), tell)
        # All changed under the group's lock.
        self.link: WorkerConnection | None = None
        self._worker: WorkerProcess | None = None
        self._timer: Timer | None = None
        self._tidying: Timer | None = None
        self._watch: LoopWatch | None = None
        self._thread: threading.Thread | None = None
        self._start_ns = 0
        self._closed = False
        limit_s = launch.settings.max_execution_s
        self.limit = (
            None if limit_s is None else ExecutionLimit(self._monitor, self._name, limit_s, self._executing)
        )

    def open(self) -> None:
        """Starts the first worker and loads the model.

        Raises:
            ConchError: The start failed, the model raised, or the worker died.
        """
        calls, waiter = self._launch.calls, self._launch.waiter
        with ExitStack() as undo:
            self._monitor.hold()
            undo.callback(self._monitor.release)
            calls.waiters.add(waiter)
            undo.callback(calls.waiters.discard, waiter)
            waiter.opening = True
            self._serve(self._start())
            undo.pop_all()
        waiter.opening = False
        self._group.join(self._member)

    def await_worker(self, again: OnAvailable) -> bool:
        """Registers a callback for when requests need not wait; False if they need not wait now."""
        with self._group.lock:
            if self.link is not None or self._group.refuses_requests or self._closed:
                return False
            self._member.on_available.append(again)
            return True

    def refusal(self) -> UnavailableError:
        """The error for batches without a worker."""
        with self._group.lock:
            waits = self._policy.phase is Phase.WAITING
            left_ns = max(self._policy.try_ns - self._monitor.clock(), 0) if waits else 0
            reason = self._policy.reason
        when = f"The next try to start it is in {left_ns / 1e9:.1f} s." if waits else ""
        retry_ms = (left_ns + self._start_ns) // _NS_PER_MS
        return in_flight_error(self._name, f"{reason} {when}", retry_ms, self._launch.library)

    def status(self) -> WorkerStatus:
        """The worker's state."""
        with self._group.lock:
            policy, worker = self._policy, self._worker
            pid = None if worker is None or worker.process.how else worker.process.pid
            return WorkerStatus(policy.phase.value, policy.restarts, pid, policy.reason)

    def close(self) -> None:
        """Asks the worker to finalize and exit, kills it on a timeout, waits for its end."""
        with self._group.lock:
            serving = self._policy.phase is Phase.SERVING
            self._policy.close()
            self._closed = True
            self.link = None
            worker, thread, timers = self._worker, self._thread, (self._timer, self._tidying)
            watch = self._watch
        self._group.leave(self._member)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        if watch is not None:
            watch.close()
        if worker is not None:
            worker.close(serving)
        if thread is not None:
            thread.join()
        if self.limit is not None:
            self.limit.close()
        self._launch.calls.waiters.discard(self._launch.waiter)
        self._monitor.release()

    # --- starting ------------------------------------------------------------------------------------------

    def _start(self) -> WorkerProcess:
        """Starts a worker and loads the model.

        Raises:
            ConchError: See `open`; the worker has ended.
        """
        start_ns = self._monitor.clock()
        worker = WorkerProcess(self._launch, self)
        with self._group.lock:
            closed = self._closed
            self._worker = worker
        with ExitStack() as undo:
            undo.callback(worker.end)
            if closed:
                raise UnavailableError(not_healthy(self._name, self._launch.library))
            worker.load(self._launch.settings.start_timeout_s)
            self._warm_up(worker.link)
            undo.pop_all()
        self._start_ns = self._monitor.clock() - start_ns
        return worker

    def _serve(self, worker: WorkerProcess) -> None:
        """Puts a loaded worker into service."""
        with self._group.lock:
            if self._closed:
                return  # `close` ends the worker
            self._policy.served(self._monitor.clock())
            self._member.check = worker.link.readiness
            self.link = worker.link
            again, self._member.on_available = self._member.on_available, []
            lost = worker.over
            self._watch = LoopWatch(
                self._monitor,
                worker.link,
                self._launch.settings.hang_s or REPORTED_S,
                lambda: self.limit is not None and self.limit.watchdog.watched > 0,
                partial(self._silent, worker),
            )
        self._tidy_later(worker.link)
        self._group.changed()
        for call in again:
            call()
        if lost:  # it died between the two
            self.lost(worker)

    def _tidy_later(self, link: WorkerConnection) -> None:
        """Returns idle memory periodically while a worker serves."""
        with self._group.lock:
            if self.link is link:
                time_ns = self._monitor.clock() + IDLE_NS
                self._tidying = self._monitor.at(time_ns, partial(self._tidy, link))

    def _tidy(self, link: WorkerConnection) -> None:
        link.tidy()
        self._tidy_later(link)

    def _retry(self) -> None:
        """Restarts the worker, on the restart thread."""
        with self._group.lock:
            if self._policy.phase is not Phase.WAITING:
                return
            self._policy.begin()
            number = self._policy.restarts
        self._group.changed()
        try:
            worker = self._start()
        except BaseException as error:  # boundary: the restart thread; the worker is started again later
            reason = as_conch_error(error).message
            with self._group.lock:
                if self._closed:
                    return
                self._policy.failed(self._monitor.clock(), reason)
            log.error(
                "worker of '%s' can't be started again, the next try is in %.1f s: %s",
                *(self._name, self._policy.wait_ns / 1e9, reason),
            )
            self._wait()
        else:
            log.info(
                "worker of '%s' serves again (pid %d, restart %d)", self._name, worker.process.pid, number
            )
            self._serve(worker)

    def _wait(self) -> None:
        """Schedules the next restart if the instance is waiting."""
        with self._group.lock:
            if self._policy.phase is not Phase.WAITING:
                return
            self._timer = self._monitor.at(self._policy.try_ns, partial(self._run, self._retry))
        self._group.changed()

    def _run(self, step: Callable[[], None]) -> None:
        """Runs a step on a new thread, because the monitor's thread must not block."""
        with self._group.lock:
            if self._closed:
                return
            before = self._thread

            def run() -> None:
                if before is not None:
                    before.join()  # it is about to end; it has set this step's timer
                step()

            thread = threading.Thread(target=run, name=f"conch-{self._name}-restart", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads
                log.error("worker of '%s' can't be started again yet: %s", self._name, error)
                again_ns = self._monitor.clock() + _NO_THREAD_NS
                self._timer = self._monitor.at(again_ns, partial(self._run, step))
            else:
                self._thread = thread

    # --- ending --------------------------------------------------------------------------------------------

    def begin_loss(self, worker: WorkerProcess) -> int:
        """See `Owner.begin_loss`."""
        with self._group.lock:
            if self._policy.phase is Phase.SERVING and self._worker is worker:
                # From here on new requests wait for the next worker; those in flight fail.
                self.link, self._member.check = None, None
                if self._tidying is not None:
                    self._tidying.cancel()  # it holds the lost connection
                if self._watch is not None:
                    self._watch.close()
                self._policy.lost(self._monitor.clock(), "")
            return max((self._policy.next_wait_ns + self._start_ns) // _NS_PER_MS, 1)

    def lost(self, worker: WorkerProcess) -> None:
        """See `Owner.lost`."""
        self.begin_loss(worker)
        with self._group.lock:
            if self._policy.phase is not Phase.LOST or self._worker is not worker:
                return
            self._policy.ended(self._monitor.clock(), worker.how)
        log.error("%s", worker.report())
        self._wait()

    def _silent(self, worker: WorkerProcess) -> None:
        """Replaces a worker whose loop has not answered for long, or reports it; on the monitor's thread."""
        seconds = self._launch.settings.hang_s
        if seconds is not None:
            worker.abort(f"its loop did not answer for the {seconds:g} s that 'CONCH_HANG_SECONDS' allows")
            return
        log.warning(
            "the loop of worker '%s' (pid %d) has not answered for %g s: its model holds it, and all its "
            "requests wait; 'CONCH_HANG_SECONDS' has such a worker replaced",
            *(self._name, worker.process.pid, REPORTED_S),
        )

    def _executing(self) -> WorkerProcess | None:
        """The process to kill if an execution hangs; None if it is ending anyway."""
        with self._group.lock:
            return self._worker if self._policy.phase in (Phase.SERVING, Phase.STARTING) else None
