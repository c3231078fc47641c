"""Loads models for their first request and evicts others to make room; the plan decides, this carries out.

A cold request goes through these steps:

1. `Registry` finds no version that serves, and `missed` raises ColdModelError for a name of the catalogue.
2. The caller's `ColdWait` joins the queue of the model; the model is *wanted* from its first request on.
3. A load thread prepares the load: the models that it needs, and their sizes.
4. The plan grants the room, names victims that make it, or has the load wait. What waits is asked about again
   when a load or an unload has ended, and every second.
5. A load thread loads the model, after the models that it is composed of, and measures them.
6. All requests of the queue go on, or get the error of the load.

States of a wanted model, as far as there is one; the load of another model may bring it too:

| state     | event                                  | next                                  |
|-----------|----------------------------------------|---------------------------------------|
| wanted    | a thread is free                       | preparing                             |
| preparing | its needs are known; it can't be read  | prepared; ended                       |
| prepared  | the plan grants; it is too large       | loading; ended                        |
| loading   | the load has ended                     | ended                                 |
| any       | the server stops                       | ended                                 |

An eviction unpublishes the model at once, drains it and closes it. A request that comes meanwhile is cold,
and a request that was resolved before is resolved again.

With a state directory, sizes and residents are written while the server runs, and a start loads the residents
again (`restore`).

Owns: catalogue, queue and plan. Threads: `conch-residency`, which decides once a second and when something
has ended, one `conch-cold-load` for each load in progress, `conch-restore` after the start, and
`conch-residency-state` for each write. Locks: one, inside which those of statistics and runners are taken.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from conch.core.clock import Clock, monotonic_ns
from conch.core.cold_models import ColdModelError, ColdModels, ColdWait, Payer
from conch.core.errors import (
    ERRORS_BY_CODE,
    ConchError,
    DeadlineExceededError,
    InternalError,
    ModelMemoryError,
    UnavailableError,
    without_details,
)
from conch.core.process_setup import memory_bytes
from conch.core.registry import Registry
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.statistics_snapshot import VersionStatistics
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.residency import Errors, Residency
from conch_control.lifecycle.resident_loads import ResidentLoads
from conch_control.repository.dependency_graph import read_composing_models
from conch_control.repository.layout import Fingerprint, is_incomplete, split_markers
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import Scan
from conch_residency.catalogue import Catalogue
from conch_residency.cold_queue import ColdQueue, Waiter
from conch_residency.gpu_memory import GpuMemory
from conch_residency.gpu_meter import GpuMeter
from conch_residency.model_sizes import (
    GPU_MEMORY,
    LEAST_BYTES,
    MEMORY,
    ResidencyParameters,
    estimate,
    estimate_on_gpu,
    gpu_copies,
    memory_of,
    read_config_of,
    read_parameters,
    worker_pids,
)
from conch_residency.nvml_memory import open_nvml_memory
from conch_residency.residency_counts import ResidencyCounts, ResidencyStatistics, ResidentModel
from conch_residency.residency_options import ResidencyOptions
from conch_residency.residency_plan import (
    Holding,
    HoldingState,
    ResidencyLimits,
    ResidencyPlan,
    RoomOutcome,
)
from conch_residency.residency_state import ResidencyFile, SavedResidency
from conch_residency.segments import Room

log = logging.getLogger(__name__)

_S = 1_000_000_000
_LOOK_NS = _S
_BLOCKED_LOOK_NS = _S // 20
"""Interval of looks for models that have become idle, while a load needs the room."""
_JOIN_S = 5.0
_TOLERATED_PERCENT = 10
"""Share of the budget that the process may exceed before memory without a holding counts."""
_MOST_NAMED = 5
_RESTORED_PERCENT = 80
"""Share of the budget up to which the models of the last run are loaded again."""
_SAVE_NS = 10 * _S
"""Least time between two writes of the state file."""
_STATE_DIRECTORY = "residency"
_HOURLY_NS = 3600 * _S
_WARM_REQUESTS = 100
_FAILED = "the model could not be loaded"
_NO_ROOM = Room()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Composing models, sizes and files of a wanted model and its parts, before its load.

    Attributes:
        parts: Models that each of the models is composed of, directly or not.
        sizes: Estimated sizes.
        states: States of the files.
    """

    parts: Mapping[str, frozenset[str]]
    sizes: Mapping[str, Room]
    states: Mapping[str, Fingerprint]


@dataclass(slots=True)
class _Wanted:
    """A wanted model; `run` is its load if a call has made it, and `result` gets the errors of the load."""

    since_ns: int
    run: Callable[[], Errors] | None = None
    result: Future[Errors] | None = None
    prepared: _Prepared | None = None
    busy: bool = False  # a thread prepares or loads it
    blocked: bool = False
    restored: bool = False


@dataclass(slots=True)
class _Seen:
    """State of a resident model at the last look."""

    uses: int = 0
    first_uses: int = 0
    """Uses before its load, by the statistics that were kept."""
    looks: int = 0
    measured_ns: int = 0
    own: Room = _NO_ROOM
    """Its memory in this process; the rest is that of its workers."""
    has_workers: bool = False
    remeasured: bool = False


@dataclass(slots=True)
class _Usage:
    """Requests of the models in memory: how many have ended, and which models have none now.

    Attributes:
        uses: Ended requests of the resident models.
        resident: Versions of the resident models.
        leaving: Versions of the models that are being unloaded.
    """

    uses: dict[str, int] = field(default_factory=dict)
    resident: dict[str, tuple[Servable, ...]] = field(default_factory=dict)
    leaving: dict[Holding, tuple[Servable, ...]] = field(default_factory=dict)

    def is_busy(self, holding: Holding) -> bool:
        """True if a holding has requests or live sequences, or came into memory since.

        The eviction of a model with a sequence, or with a request that calls another model, would wait for
        its end, and what is to happen before that may need the memory.
        """
        if holding.state is HoldingState.UNLOADING:
            return any(map(_is_busy, self.leaving.get(holding, ())))
        models = self.resident.get(holding.name)
        return models is None or any(map(_is_busy, models))


@dataclass(slots=True)
class _Pins:
    """Models that are pinned: by calls, by their configs, and by their rollouts."""

    by_calls: set[str] = field(default_factory=set)
    by_configs: set[str] = field(default_factory=set)
    by_rollouts: set[str] = field(default_factory=set)

    def reason(self, name: str) -> str:
        """Reason for which a model stays in memory, for an error; empty if nothing holds it."""
        if name in self.by_calls or name in self.by_configs:
            return "pinned"
        return "rollout" if name in self.by_rollouts else ""


class OnDemandResidency(Residency):
    """The models of a server in on-demand mode; a `conch.core.cold_models.ColdModels`.

    Args:
        options: Settings of the control plane.
        own: Limits of the models in memory.
        registry: The models in memory.
        repositories: The repositories of the models.
        loads: Loads and evicts.
        clock: Monotonic time in nanoseconds.
        gpu_memory: Reads the memory of GPUs; needed if some have a budget.

    Raises:
        InvalidArgumentError: The state directory can't be used.
    """

    def __init__(
        self,
        options: ControlOptions,
        own: ResidencyOptions,
        registry: Registry,
        repositories: Repositories,
        loads: ResidentLoads,
        clock: Clock = monotonic_ns,
        gpu_memory: GpuMemory | None = None,
    ) -> None:
        self._options = options
        self._registry = registry
        self._repositories = repositories
        self._loads = loads
        self._clock = clock
        self._rejects = own.cold_start == "reject"
        self._gpus = GpuMeter(sorted(own.gpu_memory), gpu_memory)
        gpu_budgets = tuple(own.gpu_memory[each] for each in self._gpus.devices)
        self._no_gpus = (0,) * len(gpu_budgets)
        self._budget = Room(own.budget(memory_bytes()), own.models or sys.maxsize, gpu_budgets)
        self._plan = ResidencyPlan(
            ResidencyLimits(self._budget, round(own.min_resident_s * _S), round(own.idle_s * _S))
        )
        self._timeout_ns = round(own.cold_start_timeout_s * _S)
        self._lock = threading.Condition()
        self._catalogue = Catalogue()
        self._queue = ColdQueue(own.cold_queue_size, own.cold_queue_bytes)
        self._wanted: dict[str, _Wanted] = {}
        self._seen: dict[str, _Seen] = {}
        self._leaving: dict[Holding, tuple[Servable, ...]] = {}
        self._pins = _Pins()
        self._thrashing: set[frozenset[str]] = set()
        self._changed = False
        self._closed = False
        self._baseline = 0
        self._thread: threading.Thread | None = None
        self._file: ResidencyFile | None = None
        if options.state_directory is not None:
            self._file = ResidencyFile(options.state_directory / _STATE_DIRECTORY, self._gpus.devices)
        self._writer: threading.Thread | None = None
        self._unrestored: list[str] = []
        self._restoring: threading.Thread | None = None
        self._unsaved = False
        self._saved_ns = 0
        self.statistics = ResidencyStatistics()

    @property
    def cold(self) -> ColdModels:
        """Itself: a request can have any model of the catalogue loaded."""
        return self

    # --- the catalogue ------------------------------------------------------------------------------------

    def start(self, scan: Scan) -> None:
        """Takes the models of the repositories, and begins to serve their names."""
        self.catalogue(scan)
        if self._file is not None:
            saved = self._file.read()
            self._catalogue.remember(saved.models)
            self._unrestored = list(saved.resident)
        self._baseline = self._loads.resident_bytes() or 0
        self._thread = threading.Thread(target=self._run, name="conch-residency", daemon=True)
        self._thread.start()

    def catalogue(self, scan: Scan) -> None:
        """Takes a new listing of the repositories."""
        with self._lock:
            self._catalogue.replace(scan, self._clock())

    def counts(self) -> ResidencyCounts:
        """The figures for metrics."""
        with self._lock:
            models = {
                each.name: ResidentModel(self._by_device(each.room), self._catalogue.cold_starts(each.name))
                for each in self._plan.resident()
            }
            limits = self._by_device(self._budget)
            return self.statistics.snapshot(models, limits, len(self._catalogue), len(self._queue))

    def _by_device(self, room: Room) -> dict[str, int]:
        gpus = zip(self._gpus.devices, room.gpus or self._no_gpus, strict=True)
        return {"cpu": room.bytes, **{f"gpu:{device}": taken for device, taken in gpus}}

    def ready(self, unready: Set[str]) -> bool:
        """True if the catalogue is read and the models that calls have pinned are ready."""
        with self._lock:
            return self._thread is not None and self._pins.by_calls.isdisjoint(unready)

    # --- cold requests ------------------------------------------------------------------------------------

    def missed(self, name: str) -> None:
        """See `ColdModels.missed`; accesses no storage."""
        now = self._clock()
        with self._lock:
            if name not in self._catalogue:
                self._catalogue.unknown()
                if self._catalogue.rescan_due(now):
                    self._wake()
                return
            failure = self._catalogue.failure(name, now)
        if failure is not None:
            raise _copy(failure)
        raise ColdModelError(name, self)

    def begin(self, name: str, payer: Payer | None) -> None:
        """See `ColdModels.begin`."""
        with self._lock:
            if not self._closed:
                with suppress(ConchError):  # its request has another error, and the next one gets this
                    self._want_for(payer, name, self._clock())

    def describe(self, name: str) -> Mapping[int, ModelSpec]:
        """See `ColdModels.describe`."""
        with self._lock:
            source = self._catalogue.source(name)
        if source is None or self._registry.labelled_versions(name):  # labels add versions to the policy's
            return {}
        return self._loads.describe(source)

    def kept_statistics(self, name: str) -> list[VersionStatistics]:
        """See `ColdModels.kept_statistics`."""
        with self._lock:
            kept = self._catalogue.totals(name)
        return [each for each in kept if not self._serves(each.name)]

    def wait(self, wait: ColdWait) -> None:
        """See `ColdModels.wait`."""
        name, now = wait.name, self._clock()
        with self._lock:
            if self._closed:
                raise UnavailableError("Server exiting")
            if not self._serves(name):
                self._add(wait, now)
                return
        wait.end(None)

    def _add(self, wait: ColdWait, now: int) -> None:
        name = wait.name
        failure = self._catalogue.failure(name, now)
        if failure is not None and name not in self._wanted:
            raise _copy(failure)
        self._want_for(wait.payer, name, now)
        self._plan.note_request(name, now)
        usual_ns = self._catalogue.load_ns(name)
        deadline = wait.deadline_ns
        if self._rejects:
            self.statistics.ended("rejected")
            raise _later(f"model '{name}' is not in memory, and is being loaded", usual_ns)
        if deadline is not None and usual_ns and now + usual_ns > deadline:
            self.statistics.ended("rejected")
            raise _later(
                f"model '{name}' is not in memory: its last load took {usual_ns / _S:.1f} s, and the "
                f"deadline of the request is earlier",
                usual_ns,
            )
        ends_ns = now + self._timeout_ns
        own = deadline is not None and deadline < ends_ns
        if deadline is not None:
            ends_ns = min(ends_ns, deadline)
        waiter = Waiter(wait.end, wait.size, ends_ns, wait.priority, own)
        try:
            self._queue.add(name, wait, waiter)
        except ConchError:
            self.statistics.ended("rejected")
            raise

    def leave(self, wait: ColdWait) -> bool:
        """See `ColdModels.leave`."""
        with self._lock:
            return self._queue.leave(wait.name, wait)

    # --- calls --------------------------------------------------------------------------------------------

    def load(self, name: str, run: Callable[[], Errors], pin: bool) -> Errors:
        """Makes room for a load that a call has asked for, and has it run; returns its errors.

        Args:
            name: The model.
            run: Loads it.
            pin: True if the model stays until it is unloaded.

        Raises:
            ConchError: There is no room, or the server stops.
        """
        if pin:
            with self._lock:
                self._pins.by_calls.add(name)
                self._pin()
        try:
            errors = self._load_in_turn(name, run)
        except BaseException:
            self._unpin(name)
            raise
        if name in errors and not self._serves(name):
            self._unpin(name)
        return errors

    def _load_in_turn(self, name: str, run: Callable[[], Errors]) -> Errors:
        while True:
            with self._lock:
                if self._closed:
                    raise UnavailableError("Server exiting")
                wanted = self._wanted.get(name)
                if wanted is None:
                    if self._serves(name):
                        break
                    future: Future[Errors] = Future()
                    self._catalogue.changed(name)
                    self._request_load(name, self._clock())
                    self._wanted[name].run, self._wanted[name].result = run, future
                    mine = True
                else:  # cold requests have it loaded, or another call
                    wanted.result = future = wanted.result or Future()
                    mine = False
            errors = future.result()
            if mine:
                return errors
        errors = run()  # it is in memory, and is replaced
        self.measure(name)
        return errors

    def measure(self, name: str) -> None:
        """Measures a model again, of which other versions are in memory now."""
        self._measure_again([name])

    def unload(self, name: str, with_parts: bool) -> bool:
        """Unpins and evicts a model; False if it is not in memory."""
        self._unpin(name)
        with self._lock:
            self._catalogue.changed(name)
            parts = () if (holding := self._plan.holding(name)) is None else sorted(holding.parts)
            victims = self._plan.evict(name)
            if with_parts:
                for part in parts:
                    if part not in self._plan.pinned and not self._has_above(part):
                        victims += self._plan.evict(part)
        self._evict(victims, "unload")
        return bool(victims)

    def _has_above(self, name: str) -> bool:
        return any(name in each.parts for each in self._plan.resident())

    def pin_for_rollout(self, name: str, pinned: bool) -> None:
        """Keeps a model in memory while True, if it is there or as soon as it is.

        A call that unloads the model still does so.
        """
        with self._lock:
            (self._pins.by_rollouts.add if pinned else self._pins.by_rollouts.discard)(name)
            self._pin()
            self._wake()

    def stop(self) -> None:
        """Ends all waits; no more loads begin."""
        with self._lock:
            first, self._closed = not self._closed, True
            saved = self._to_save() if first and self._thread is not None else None
            waiters = [waiter for name in self._queue.in_order for waiter in self._queue.take_waiters(name)]
            futures = [each.result for each in self._wanted.values() if each.result is not None]
            self._wanted.clear()
            self._lock.notify_all()
        error = UnavailableError("Server exiting")
        for waiter in waiters:
            waiter.then(_copy(error))
        for future in futures:
            if not future.done():
                future.set_exception(_copy(error))
        if self._file is not None and saved is not None:
            if self._writer is not None:
                self._writer.join()
            self._file.write(saved)

    def close(self) -> None:
        """Stops, and waits for the threads."""
        self.stop()
        for thread in (self._thread, self._restoring):
            if thread is not None:
                thread.join(_JOIN_S)
        self._gpus.close()

    # --- restarts -----------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Begins to load the models again that the last run had in memory; the ports are open.

        One at a time, so that requests find load threads and each load is measured alone.
        """
        if self._unrestored:
            self._restoring = threading.Thread(target=self._restore, name="conch-restore", daemon=True)
            self._restoring.start()

    def _restore(self) -> None:
        share = self._budget.share(_RESTORED_PERCENT)
        restored = 0
        while True:
            with self._lock:
                if self._closed or not self._unrestored:
                    break
                name = self._unrestored[0]
                size = self._catalogue.last_size(name)
                wanted = name in self._wanted or self._serves(name)
                future: Future[Errors] | None = None
                if size is not None and not wanted and (self._plan.total + size).within(share):
                    future = Future()
                    self._request_load(name, self._clock())
                    self._wanted[name].result, self._wanted[name].restored = future, True
            try:
                if future is not None and name not in future.result():
                    restored += 1
            except ConchError:  # the server stops
                break
            with self._lock:
                self._unrestored.pop(0)
        log.info("%d models of the last run are in memory again", restored)

    def _to_save(self) -> SavedResidency | None:
        if self._file is None:
            return None
        self._unsaved, self._saved_ns = False, self._clock()
        resident = [each.name for each in reversed(self._plan.resident())]
        left = [each for each in self._unrestored if self._plan.holding(each) is None]
        return SavedResidency(self._catalogue.sizes(), (*resident, *left))

    def _save(self) -> None:
        """Begins to write the state if it has changed and the last write was some time ago."""
        with self._lock:
            writes = self._writer is not None and self._writer.is_alive()
            due = self._unsaved and not writes and self._clock() >= self._saved_ns + _SAVE_NS
            saved = self._to_save() if due and not self._closed else None
            if self._file is not None and saved is not None:
                # On a thread of its own, as a disk may be slow.
                self._writer = threading.Thread(
                    target=self._file.write, args=(saved,), name="conch-residency-state", daemon=True
                )
                self._writer.start()

    # --- the thread ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._changed = True
        self._lock.notify_all()

    def _request_load(self, name: str, now: int) -> None:
        if self._queue.add_wanted(name):
            self._wanted[name] = _Wanted(now)
            self._wake()

    def _want_for(self, payer: Payer | None, name: str, now: int) -> None:
        """Has a model loaded for a request, which pays if no other one has begun the load."""
        if payer is not None and name not in self._wanted:
            try:
                payer.pay_load()
            except ConchError:
                self.statistics.ended("rejected")
                raise
        self._request_load(name, now)

    def _serves(self, name: str) -> bool:
        entry = self._registry.entries.get(name)
        return entry is not None and bool(entry.ready)

    def _run(self) -> None:
        look_ns = self._clock() + _LOOK_NS
        while True:
            with self._lock:
                while not (self._closed or self._changed):
                    now = self._clock()
                    until = min(look_ns, self._queue.next_end_ns() or look_ns)
                    if any(each.blocked for each in self._wanted.values()):
                        until = min(until, now + _BLOCKED_LOOK_NS)
                    left = until - now
                    if left <= 0:
                        break
                    self._lock.wait(left / _S)
                if self._closed:
                    return
                self._changed = False
            try:
                if self._clock() >= look_ns:
                    self._look()
                    look_ns = self._clock() + _LOOK_NS
                self._expire()
                self._rescan()
                self._schedule()
                self._save()
            except Exception:  # boundary: the thread goes on
                log.exception("models could not be scheduled")

    def _expire(self) -> None:
        """Fails the requests that have waited too long."""
        now = self._clock()
        with self._lock:
            expired = self._queue.expire(now)
            reasons = {name: self._wait_reason(name) for name, _ in expired}
            hopeless = [
                (name, self._wait_reason(name)())
                for name, wanted in self._wanted.items()
                if not wanted.busy
                and now >= wanted.since_ns + self._timeout_ns
                and not self._queue.waiting(name)
            ]
        for name, error in hopeless:
            self._end(name, error, {}, remember=False)
        for name, waiter in expired:
            self.statistics.ended("timeout")
            if waiter.own_deadline:
                waiter.then(DeadlineExceededError("Deadline Exceeded"))
            else:
                waiter.then(reasons[name]())

    def _wait_reason(self, name: str) -> Callable[[], ConchError]:
        """Makes the error of a request that has waited too long; called with the lock held."""
        wanted = self._wanted.get(name)
        seconds = self._timeout_ns / _S
        if wanted is None or not wanted.blocked:
            text = f"model '{name}' was not loaded within {seconds:g} s (--cold-start-timeout)"
            return partial(UnavailableError, text)
        return partial(
            ModelMemoryError,
            f"no memory for model '{name}' within {seconds:g} s (--cold-start-timeout): {self._holders()}",
        )

    def _holders(self) -> str:
        """The largest models in memory, for an error."""
        largest = sorted(self._plan.holdings, key=lambda each: -each.bytes)
        shown = []
        for each in largest[:_MOST_NAMED]:
            reason = self._pins.reason(each.name)
            shown.append(f"'{each.name}' has {each.bytes / 1e6:.0f} MB" + (f" ({reason})" if reason else ""))
        if len(largest) > _MOST_NAMED:
            shown.append(f"{len(largest) - _MOST_NAMED} more have less")
        limit = f"of {self._budget.bytes / 1e6:.0f} MB (--resident-memory) "
        return limit + (", ".join(shown) or "no model has any")

    def _rescan(self) -> None:
        """Lists the repositories again if an unknown name calls for it; forgets failures of changed files."""
        now = self._clock()
        with self._lock:
            due = self._catalogue.rescan_due(now)
            failed = {name: self._catalogue.source(name) for name in self._catalogue.failed_states(now)}
            states = self._catalogue.failed_states(now)
        if due:
            self.catalogue(self._repositories.list_available())
        for name, source in failed.items():
            try:
                changed = source is not None and source.fingerprint() != states[name]
            except (ConchError, OSError):
                continue  # the next load reports it
            if changed:
                with self._lock:
                    self._catalogue.changed(name)

    def _look(self) -> None:
        """Records which models were used; evicts idle ones, and some if measurements exceed the budget."""
        self._remeasure()
        usage = self._usage()
        with self._lock:
            now = self._clock()
            self._note_uses(usage, now)
            expired = self._plan.expired(now, usage.is_busy)
            surplus = self._plan.shrink(now, usage.is_busy)
        self._evict(expired, "idle")
        self._evict(surplus, "memory")

    def _usage(self) -> _Usage:
        """Looks at the models in memory, without the lock: their counters have locks of their own."""
        with self._lock:
            names = [each.name for each in self._plan.resident()]
            usage = _Usage(leaving=dict(self._leaving))
        for name in names:
            entry = self._registry.entries.get(name)
            models = usage.resident[name] = () if entry is None else tuple(entry.ready.values())
            usage.uses[name] = _uses_of(models)
        return usage

    def _note_uses(self, usage: _Usage, now: int) -> None:
        for name, uses in usage.uses.items():
            holding, seen = self._plan.holding(name), self._seen.get(name)
            if holding is None or seen is None or uses == seen.uses:
                continue
            seen.uses = uses
            self._unsaved = True
            seen.looks += 1
            if seen.looks > 1:  # the first ones are those that it was loaded for
                self._plan.used(name, now)
            else:
                holding.used_ns = now

    def _remeasure(self) -> None:
        """Measures models after their first requests and hourly, and the memory of this process."""
        now = self._clock()
        with self._lock:
            due = []
            for holding in self._plan.resident():
                seen = self._seen.setdefault(holding.name, _Seen())
                warm = not seen.remeasured and seen.uses - seen.first_uses >= _WARM_REQUESTS
                if seen.has_workers and (warm or now >= seen.measured_ns + _HOURLY_NS):
                    seen.remeasured |= warm
                    due.append(holding.name)
        self._measure_again(due)
        before = self._explained()
        process, on_gpus = self._loads.resident_bytes(), self._gpus.own()
        with self._lock:
            explained = self._explained()
            if explained != before:
                return  # a model has come or gone meanwhile: the next look measures
            tolerated = Room(self._budget.bytes * _TOLERATED_PERCENT // 100)
            grown = Room(0 if process is None else process - self._baseline, gpus=on_gpus)
            self._plan.unexplained = (grown - explained - tolerated).positive

    def _explained(self) -> Room:
        """Memory of this process that models in memory have taken, or may be taking now."""
        with self._lock:
            own = sum((each.own for each in self._seen.values()), Room())
            moving = [each.room for each in self._plan.holdings if each.state is not HoldingState.RESIDENT]
            return sum(moving, own)

    def _measure_again(self, names: Iterable[str]) -> None:
        """Measures the workers of models, and the growth of this process by a load since."""
        for name in names:
            entry = self._registry.entries.get(name)
            models = () if entry is None else tuple(entry.ready.values())
            grown = self._loads.host_bytes(name)
            pids = worker_pids(models)
            workers = Room(memory_of(pids), gpus=self._gpus.of_workers(pids))
            with self._lock:
                holding, seen = self._plan.holding(name), self._seen.setdefault(name, _Seen())
                if holding is None:
                    continue
                if grown is not None:
                    seen.own = Room(grown, gpus=seen.own.gpus)
                seen.has_workers, seen.measured_ns = bool(pids), self._clock()
                size = _at_least(seen.own + workers)
                self._plan.resized(name, size)
                self._catalogue.grown(name, size)
                self._unsaved = True

    # --- loads and evictions ------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Prepares and loads what is wanted, in order, as far as there are threads and room."""
        begin: list[Callable[[], None]] = []
        victims: list[Holding] = []
        ended: list[tuple[str, ConchError | None]] = []
        with self._lock:
            waiting = any(each.prepared is not None and not each.busy for each in self._wanted.values())
        usage = self._usage() if waiting else _Usage()
        with self._lock:
            if self._closed:
                return
            now = self._clock()
            self._note_uses(usage, now)
            self._plan.drop_claims()
            threads = self._options.load_threads - sum(each.busy for each in self._wanted.values())
            for name in self._queue.in_order:
                wanted = self._wanted[name]
                if wanted.busy:
                    continue
                if threads <= 0:
                    break
                if wanted.prepared is None:
                    wanted.busy = True
                    threads -= 1
                    begin.append(partial(self._prepare, name, wanted))
                    continue
                holding = self._plan.holding(name)
                if holding is not None:
                    if holding.state is HoldingState.RESIDENT:
                        if self._serves(name):
                            ended.append((name, None))
                        else:  # it was unloaded behind the plan
                            victims += self._plan.evict(name)
                    continue  # else it is part of another load
                sizes = wanted.prepared.sizes
                needs = {each: sizes[each] for each in sizes if self._plan.holding(each) is None}
                decision = self._plan.request(name, needs, sizes, now, usage.is_busy)
                wanted.blocked = decision.outcome is RoomOutcome.BLOCKED
                victims += decision.victims
                if decision.outcome is RoomOutcome.GRANTED:
                    wanted.busy = True
                    threads -= 1
                    self.statistics.queued(now - wanted.since_ns)
                    begin.append(partial(self._load, name, wanted, needs))
                elif decision.outcome is RoomOutcome.TOO_LARGE:
                    ended.append((name, self._too_large(name, sizes)))
            self._warn_of_thrashing()
        self._evict(victims, "room")
        for name, error in ended:
            self._end(name, error, {})
        for work in begin:
            threading.Thread(target=work, name="conch-cold-load", daemon=True).start()

    def _too_large(self, name: str, sizes: Mapping[str, Room]) -> ConchError:
        holdings = {each: self._plan.holding(each) for each in sizes}
        size = sum((sizes[each] if held is None else held.room for each, held in holdings.items()), Room())
        for device, needed, budget in zip(self._gpus.devices, size.gpus, self._budget.gpus, strict=False):
            if needed > budget:
                return ModelMemoryError(
                    f"no memory for model '{name}': it needs {needed / 1e6:.0f} MB of GPU {device}, and "
                    f"all models together have {budget / 1e6:.0f} MB (--resident-gpu-memory); its "
                    f"parameter {GPU_MEMORY} corrects a wrong estimate"
                )
        if size.bytes <= self._budget.bytes:
            return ModelMemoryError(
                f"no memory for model '{name}': it is composed of {len(sizes) - 1} models, and "
                f"--resident-models allows {self._budget.models} in memory"
            )
        return ModelMemoryError(
            f"no memory for model '{name}': it needs {size.bytes / 1e6:.0f} MB, and all models together have "
            f"{self._budget.bytes / 1e6:.0f} MB (--resident-memory); its parameter {MEMORY} corrects a "
            f"wrong estimate"
        )

    def _warn_of_thrashing(self) -> None:
        for pair in self._plan.thrashing:
            if pair not in self._thrashing:
                self._thrashing.add(pair)
                self.statistics.thrash += 1
                log.warning(
                    "models %s evict each other again and again: they need more --resident-memory",
                    " and ".join(f"'{each}'" for each in sorted(pair)),
                )
        self._plan.thrashing.clear()

    def _prepare(self, name: str, wanted: _Wanted) -> None:
        """Finds out what a load needs; on a load thread."""
        try:
            prepared = self._read(name)
        except Exception as error:  # boundary: repositories of add-ons
            if not isinstance(error, ConchError):
                log.exception("model '%s' could not be read", name)
            self._end(name, without_details(error, _FAILED), {})
            return
        with self._lock:
            wanted.prepared = prepared
            wanted.busy = False
        self._schedule()

    def _read(self, name: str) -> _Prepared:
        parts: dict[str, tuple[str, ...]] = {}
        sizes: dict[str, Room] = {}
        states: dict[str, Fingerprint] = {}
        unread = [name]
        with self._lock:
            scan = self._catalogue.scan
        while unread:
            each = unread.pop()
            if each in parts:
                continue
            source = scan.source(each)
            parts[each] = () if source is None else read_composing_models(source, self._options)
            unread += parts[each]
            sizes[each] = Room(LEAST_BYTES, 1, self._no_gpus)
            if source is not None:
                state = states[each] = source.fingerprint()
                if is_incomplete(split_markers(state)[1]):
                    raise UnavailableError(f"model '{each}' is incomplete: it has a marker .incomplete")
                config = read_config_of(source, self._options)
                parameters = {key: value.string_value for key, value in config.parameters.items()}
                own = read_parameters(each, parameters)
                with self._lock:
                    known = self._catalogue.size(each, state)
                sizes[each] = known or self._estimate(state, config, own)
        return _Prepared(_closures(parts), sizes, states)

    def _estimate(self, state: Fingerprint, config: ModelConfig, own: ResidencyParameters) -> Room:
        gpus = self._no_gpus
        if gpus:
            copies = gpu_copies(state, config, self._options.devices)
            one = estimate_on_gpu(state) if own.gpu_bytes is None else own.gpu_bytes
            gpus = tuple(copies.get(device, 0) * one for device in self._gpus.devices)
        return Room(estimate(state, config) if own.bytes is None else own.bytes, 1, gpus)

    def _load(self, name: str, wanted: _Wanted, needs: Mapping[str, Room]) -> None:
        """Runs a load that the plan has granted; on a load thread."""
        began, on_gpus = self._clock(), self._gpus.begin()
        errors: Errors
        with self._lock:
            scan = self._catalogue.scan
        try:
            errors = self._loads.load(name, scan) if wanted.run is None else wanted.run()
        except Exception as raised:  # boundary: the load runs code of models and add-ons
            errors = {name: raised}
        took = self._clock() - began
        error = errors.get(name)
        if error is not None and not isinstance(error, ConchError):
            log.error("failed to load '%s'", name, exc_info=error)
        prepared = wanted.prepared
        assert prepared is not None, "it was granted"
        brought = {}
        for each in prepared.sizes:
            entry = self._registry.entries.get(each)
            if entry is not None and entry.ready and (each in needs or self._plan.holding(each) is None):
                brought[each] = list(entry.ready.values())
        pids = {each: worker_pids(models) for each, models in brought.items()}
        taken = self._gpus.end(on_gpus, [pid for each in pids.values() for pid in each])
        if len(brought) != 1:  # it is not known which of them has taken what in this process
            taken = (None,) * len(taken)
        measured = {each: self._measured(each, prepared.sizes[each], pids[each], taken) for each in brought}
        parameters = {each: _parameters_of(models) for each, models in brought.items()}
        self._add_totals(brought)
        uses = {each: _uses_of(models) for each, models in brought.items()}
        now = self._clock()
        with self._lock:
            sizes = {each: size for each, (size, _) in measured.items()}
            self._plan.ended(name, sizes, prepared.parts, now, wanted.restored)
            for each, (size, own) in measured.items():
                looks = 1 if wanted.restored else 0  # the last run has used it
                self._seen[each] = _Seen(uses[each], uses[each], looks, now, own, bool(pids[each]))
                self._plan.set_idle(each, parameters[each].idle_ns)
                if each in prepared.states:
                    self._catalogue.measured(each, prepared.states[each], size)
            if name in parameters and parameters[name].pinned:
                self._pins.by_configs.add(name)
                self._pin()
            if error is None:
                self._catalogue.loaded(name, took)
                self.statistics.loaded(now - wanted.since_ns)
            self._unsaved = True
        self._end(name, None if error is None else without_details(error, _FAILED), errors)

    def _measured(
        self, name: str, estimated: Room, pids: Collection[int], taken: tuple[int | None, ...]
    ) -> tuple[Room, Room]:
        """Memory of a model after its load, and the part of it that is in this process.

        Args:
            name: The model.
            estimated: Size that counts where a measurement is missing.
            pids: Its worker processes.
            taken: Bytes that the load has taken on each GPU; None where that is not known.
        """
        workers = Room(memory_of(pids), gpus=self._gpus.of_workers(pids))
        grown = self._loads.host_bytes(name)
        host = max(estimated.bytes, workers.bytes) if grown is None else grown + workers.bytes
        gpus = tuple(
            max(guess, of_workers) if known is None else known
            for guess, of_workers, known in zip(estimated.gpus, workers.gpus, taken, strict=True)
        )
        size = _at_least(Room(host, 1, gpus))
        return size, Room(size.bytes - workers.bytes, 0, (size - workers).gpus)

    def _end(self, name: str, error: ConchError | None, errors: Errors, remember: bool = True) -> None:
        """Ends a wanted model: its requests go on, or get the error, which may be remembered."""
        with self._lock:
            wanted = self._wanted.pop(name, None)
            waiters = self._queue.take_waiters(name)
            remember &= wanted is not None and wanted.run is None and not self._closed
            if error is not None and wanted is not None and remember:
                state = None if wanted.prepared is None else wanted.prepared.states.get(name)
                self._catalogue.failed(name, error, state, self._clock())
            if error is None:
                self._catalogue.cold_started(name, len(waiters))
            self._wake()
        for waiter in waiters:
            self.statistics.ended("loaded" if error is None else "failed")
            waiter.then(None if error is None else _copy(error))
        if wanted is not None and wanted.result is not None and not wanted.result.done():
            wanted.result.set_result(errors if error is None or errors else {name: error})

    def _evict(self, victims: Iterable[Holding], reason: str) -> None:
        now = self._clock()
        for holding in victims:
            with self._lock:
                self._seen.pop(holding.name, None)
                self._unsaved = True
                self.statistics.evicted(reason, now - holding.since_ns)
            log.info("evicting '%s': %s", holding.name, reason)
            entry = self._registry.entries.get(holding.name)
            with self._lock:
                self._leaving[holding] = () if entry is None else tuple(entry.ready.values())
            self._loads.evict(holding.name, partial(self._gone, holding))
            if entry is not None:  # it gets no more requests
                self._keep_totals(holding.name, entry.ready.values())

    def _keep_totals(self, name: str, models: Iterable[Servable]) -> None:
        totals = tuple((model.spec.version, model.statistics.keep()) for model in models)
        with self._lock:
            self._catalogue.keep_totals(name, totals)

    def _add_totals(self, brought: Mapping[str, Iterable[Servable]]) -> None:
        """Has the statistics of loaded models go on from their totals before the eviction."""
        for name, models in brought.items():
            with self._lock:
                kept = dict(self._catalogue.take_totals(name))
            for model in models:
                if model.spec.version in kept:
                    model.statistics.add_kept(kept[model.spec.version])

    def _gone(self, holding: Holding) -> None:
        with self._lock:
            self._plan.note_unloaded(holding)
            self._leaving.pop(holding, None)
            self._wake()

    def _pin(self) -> None:
        self._plan.pinned = self._pins.by_calls | self._pins.by_configs | self._pins.by_rollouts

    def _unpin(self, name: str) -> None:
        with self._lock:
            self._pins.by_calls.discard(name)
            self._pins.by_configs.discard(name)
            self._pin()


def open_residency(
    options: ControlOptions,
    own: ResidencyOptions,
    registry: Registry,
    repositories: Repositories,
    loads: ResidentLoads,
) -> OnDemandResidency:
    """Makes the residency of one server, which reads the memory of GPUs if some have a budget.

    Raises:
        InvalidArgumentError: The state directory or the library for GPUs can't be used.
    """
    gpu_memory = open_nvml_memory(own.gpu_memory) if own.gpu_memory else None
    try:
        return OnDemandResidency(options, own, registry, repositories, loads, gpu_memory=gpu_memory)
    except BaseException:
        if gpu_memory is not None:
            gpu_memory.close()
        raise


def _is_busy(model: Servable) -> bool:
    gauges = model.statistics.gauges()
    return bool(gauges.pending or gauges.running or model.pending or model.live_sequences)


def _uses_of(models: Iterable[Servable]) -> int:
    return sum(model.statistics.ended[0] for model in models)


def _parameters_of(models: Iterable[Servable]) -> ResidencyParameters:
    """Residency parameters of a loaded model, from the config of its newest version."""
    newest = max(models, key=lambda model: model.spec.version)
    try:
        return read_parameters(newest.spec.name, newest.spec.parameters)
    except ConchError as error:
        log.error("%s", error.message)  # of a load with its own config
        return ResidencyParameters()


def _at_least(size: Room) -> Room:
    return Room(max(size.bytes, LEAST_BYTES), 1, size.gpus)


def _closures(parts: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    """All models that each one is composed of, directly or not."""

    def closure(name: str) -> frozenset[str]:
        found: set[str] = set()
        unseen = list(parts[name])
        while unseen:
            each = unseen.pop()
            if each not in found:
                found.add(each)
                unseen += parts[each]
        return frozenset(found)

    return {name: closure(name) for name in parts}


def _copy(error: ConchError) -> ConchError:
    """An error for one request: raising a shared one would collect the tracebacks of all."""
    kind = ModelMemoryError if isinstance(error, ModelMemoryError) else ERRORS_BY_CODE.get(error.code)
    copied = (kind or InternalError)(error.message)
    copied.retry_after_ms = error.retry_after_ms
    return copied


def _later(text: str, usual_ns: int) -> UnavailableError:
    error = UnavailableError(f"{text}: send the request again later")
    error.retry_after_ms = max(usual_ns // 1_000_000, 1000)
    return error
