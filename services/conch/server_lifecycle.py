"""Starts and stops the components of a server, in order.

`start` and `stop` may run on different threads; a stop cancels a start. The state is the server's `Stage` and
whether a start runs. States down, events across; an empty field is an event that does not occur:

    ====================  ================  =====================  ========================================
    state                 `start`           the start ends         `stop`
    ====================  ================  =====================  ========================================
    STARTING              runs                                     STOPPING; closes
    STARTING, start runs                    SERVING or FAILED;     STOPPING; ends the loads, waits for the
                                            error: closes          start, closes
    SERVING, FAILED                                                DRAINING; then as below
    DRAINING                                                       after the drain delay STOPPING; ends a
                                                                   start, waits for sequences, closes
    STOPPING, start runs                    error: closes nothing
    STOPPING              raises            error: closes nothing  closes what is left
    ====================  ================  =====================  ========================================

FAILED is a start that could not read the repositories and goes on, to report that. A start that a stop
cancels raises at its next `check_running`; past the last one it starts the parts, and the stop closes them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from conch.core.errors import ConchError, InternalError, error_text
from conch.core.model_control import IndexEntry
from conch.core.server_stage import Stage
from conch.parts.server_part import ServerPart
from conch.process.exposure import open_control_warning
from conch.process.start_diagnostics import SlowLoads, cause_line, repository_hint
from conch.server_components import Components
from conch.server_options import PartOptions
from conch_control.lifecycle.startup_models import LoadFailure

log = logging.getLogger(__name__)

_SEQUENCE_INTERVAL_S = 0.02
_TRACES_S = 5.0  # for traces that wait to be written
_PLANNER_STOP_S = 1.0


class Lifecycle:
    """Start and stop of one server.

    Attributes:
        failures: The startup models that failed to load.
        models_at_failure: The index of a start that failed because of models; else empty.
    """

    def __init__(self, components: Components, options: PartOptions) -> None:
        self._context = components.context
        self._policy, self._planner = components.policy, components.planner
        self._core, self._agent = components.context.core.state, components.context.control.agent
        self._parts = components.context.ports.parts
        self._options = options
        self.failures: list[LoadFailure] = []
        self.models_at_failure: list[IndexEntry] = []
        self._slow_loads = SlowLoads(self._agent.unfinished)
        self._operations_ended = True
        self._start_ended = threading.Event()  # set unless a start runs
        self._start_ended.set()
        self._waiting = threading.Event()  # never set: a stop sleeps on it

    def start(self) -> None:
        """Starts; see `Server.start`."""
        self._start_ended.clear()
        try:
            self._start()
        except BaseException:
            if self._core.stages.stage is not Stage.STOPPING:
                self._slow_loads.stop()
                self._close(time.monotonic())
            raise
        finally:
            self._start_ended.set()

    def _start(self) -> None:
        self._core.check_running()
        if warning := open_control_warning(self._options):
            log.warning("%s", warning)
        if self._policy is not None and self._context.access is not None:  # both or neither
            self._policy.start(self._context.access)
        self._slow_loads.start()
        for part in self._parts:
            part.check()
        if self._planner is not None:
            self._planner.remember()
        for part in self._parts:
            if part.before_models or self._options.server.listen_while_loading:
                part.start()
        loaded = self._load_models()
        if loaded:
            for part in self._parts:
                part.check_models()
        for part in self._parts:
            part.start()
        if loaded:
            self._agent.restore()
        if loaded and self._planner is not None:
            self._planner.start({failure.name: failure.error for failure in self.failures})

    def _load_models(self) -> bool:
        """Loads the startup models; returns False if the repositories can't be read and the server goes on.

        Raises:
            ConchError: It shall not go on, or was stopped.
        """
        control, server = self._options.control, self._options.server
        locations = [] if control.model_name else map(str, control.repositories)
        wrong = [hint for each in locations if (hint := repository_hint(each))]
        for hint in wrong:
            log.warning("%s", hint)
        try:
            self.failures = self._agent.start()
        except ConchError as error:
            self._core.check_running()
            if server.exit_without_repository:
                raise
            log.error("%s", error_text(error))
            self._core.failed()
            return False
        self._core.check_running()
        if self.failures and server.exit_on_error:
            self.models_at_failure = self._agent.index(False)  # they are unloaded when this has failed
            failed = InternalError("failed to load all models")
            for line in [*wrong, *(cause_line(each.name, each.reason) for each in self.failures)]:
                failed.add_note(line)
            raise failed
        self._core.started()
        return True

    def drain(self) -> None:
        """Makes the server not ready; it goes on answering requests."""
        if self._core.drain():
            log.info("the server is draining: it is not ready any more, and goes on answering")
            self._agent.draining_began()

    def stop(self) -> bool:
        """Stops; see `Server.stop`."""
        stages, server = self._core.stages, self._options.server
        if stages.stage is not Stage.STARTING:
            self.drain()
            self._waiting.wait(max(server.drain_delay_s - stages.seconds_in(Stage.DRAINING), 0.0))
        log.info("Waiting for in-flight requests to complete.")
        self._core.stopping()
        end = time.monotonic() + server.exit_timeout_s
        for part in self._parts:
            part.refuse_changes()
        self._slow_loads.stop()
        self._agent.stop_loads()  # else a client's load would use up the time of open requests
        if not self._start_ended.is_set():
            self._agent.close(_left(end))  # waits for the loads of the start, which are stopped, and unloads
        if not self._start_ended.wait(_left(end)):
            return False  # the start hangs, such as in storage, and may still use what would be closed
        if self._planner is not None:
            self._planner.stop(0.0)  # starts no more loads; the agent ends running ones
        self._wait_for_sequences(end)
        return self._close(end)

    def _wait_for_sequences(self, end: float) -> None:
        """Waits until live sequences end or become idle: closed connections would break them off."""
        if self._core.sequences:
            self._core.refuse_new()
        while self._core.sequences and time.monotonic() < end:
            self._waiting.wait(_SEQUENCE_INTERVAL_S)

    def _close(self, end: float) -> bool:
        """Ends all parts, unloads the models and closes what is left; True if all ended in time."""
        context = self._context
        ended = self._run_for_all_parts(lambda part, left_s: part.drain(left_s), end)
        ended = self._run_for_all_parts(lambda part, left_s: part.disconnect(left_s), end) and ended
        # Blocked storage can outlast the calls that wait for it; what has been given up stays so.
        self._operations_ended = context.door.close(lambda: _left(end)) and self._operations_ended
        ended = self._operations_ended and ended
        for part in self._parts:
            part.flush(_left(end))
        ended = self._agent.close(_left(end)) and ended
        if self._planner is not None:
            # A planner that hangs in storage holds nothing to finish.
            self._planner.stop(min(_PLANNER_STOP_S, _left(end)))
        for part in self._parts:
            ended = part.close(_left(end)) and ended
        context.ports.loop.stop()
        if self._policy is not None:
            self._policy.stop()
        context.ports.addresses.clear()
        context.observability.tracing.tracer.close(min(_TRACES_S, _left(end)))
        context.core.regions.close()
        if context.core.cache is not None:
            context.core.cache.close()
        return ended

    def _run_for_all_parts(self, stage: Callable[[ServerPart, float], bool], end: float) -> bool:
        """Runs a stage of the stop for all parts at once."""
        with ThreadPoolExecutor(max(len(self._parts), 1), "conch-stop") as threads:
            return all([*threads.map(lambda part: stage(part, _left(end)), self._parts)])


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)
