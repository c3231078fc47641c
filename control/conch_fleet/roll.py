"""Decides which server loads or unloads what next: a pure state machine over all servers of a fleet.

Inputs are what is wanted (`want`, `drop`), what servers show (`seen`, `lost`) and passed time (`tick`); the
output is steps to start, each a load or an unload of one model on one server. A wanted model has a
generation, which grows with each change of its files; a server's copy has the one that it was loaded for.

| a server's copy      | event                                                    | next                     |
|----------------------|----------------------------------------------------------|--------------------------|
| missing, or older    | the model's turn is at this server (below)               | loading                  |
| loading              | the load has succeeded                                   | current                  |
| loading              | it has failed for good                                   | as before; model is held |
| loading              | it may succeed later                                     | as before, after a pause |
| current, or older    | the model is dropped, or current on all its servers now  | unloading, if not wanted |
| any                  | the server has been started again                        | missing                  |

Turns: a model is loaded on one server at a time, first on those without a copy. While a server replaces
copies, no other server does; and none does while a server that returned has not tried to get its models
again. A held model stays as it is, except on servers that returned. Servers that are lost or drain count as
absent: the others go on, and what was placed there is placed elsewhere after `grace_ns`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from conch.core.errors import ConchError, InvalidArgumentError, without_details
from conch_control.planner.plan import FIRST_RETRY_NS, LAST_RETRY_NS, LoadOutcome
from conch_control.planner.planner_loop import outcome_of
from conch_control.remote_api.messages import UnreachableError
from conch_fleet.fleet_state import Change, Ended, ModelState, Note, RollStep, ServerState, Sight
from conch_fleet.placement import Demand, Placement, Room, place
from conch_fleet.placement_file import PlacementRules


class Roll:
    """State machine of a fleet; not thread-safe.

    Attributes:
        notes: Decisions since the caller has last taken them out.
        changes: Changes that the planner has to know, likewise.
        strangers: A server that was started shows models that are not wanted; the caller resets it.
    """

    def __init__(self, rules: PlacementRules, grace_ns: int, now: int) -> None:
        self._rules = rules
        self._grace_ns = grace_ns
        self._servers = {each.address: ServerState(each, now) for each in rules.servers}
        self._models: dict[str, ModelState] = {}
        self._generation = 0
        self._unload_errors: dict[str, ConchError] = {}
        self.notes: list[Note] = []
        self.changes: list[Change] = []
        self.strangers = False

    # --- inputs

    def want(self, name: str, parts: tuple[str, ...], now: int) -> list[RollStep]:
        """A model is new or has changed: each of its servers is to load it."""
        self._generation += 1
        model = self._models.get(name)
        if model is None:
            self._models[name] = ModelState(self._generation, parts)
        else:
            model.generation, model.parts, model.error, model.held = self._generation, parts, None, False
        for server in self._servers.values():
            server.refused.discard(name)
            server.doomed.discard(name)
            server.pauses.pop(name, None)
        return self._next(now)

    def drop(self, name: str, now: int) -> list[RollStep]:
        """Removes a model: all servers are to unload it."""
        self._models.pop(name, None)
        self._unload_errors.pop(name, None)
        for server in self._servers.values():
            server.pauses.pop(name, None)
            if name in server.copies:
                server.doomed.add(name)
        return self._next(now)

    def seen(self, address: str, sight: Sight, ended: Sequence[Ended], now: int) -> list[RollStep]:
        """A server has been reached; `ended` are its steps that ended before it was looked at."""
        own = {name: size for name, size in sight.serving.items() if self._rules.loads(name)}
        sight = replace(sight, serving=own)  # what servers load for requests is theirs
        server = self._servers[address]
        returned, new_life = not server.up, sight.epoch != server.epoch
        if new_life:
            server.forget()
        for step, error in ended:
            # What a server did before it was started again is undone, and one that stops has its own errors.
            if new_life or (error is not None and sight.draining):
                server.running.pop(step.model, None)
            else:
                self._end(server, step, error, now)
        if sight.draining and not server.draining:
            self._note(f"server {address} drains: it gets no more models", logging.WARNING)
        if server.usable:
            server.absent_at = now  # the last moment when it was not
        server.up, server.epoch, server.draining = True, sight.epoch, sight.draining
        server.gone = server.gone and server.draining
        self._compare(server, sight, new_life)
        self._place()
        if new_life:
            server.returning = {name for name, model in self._models.items() if address in model.servers}
        if returned:
            again = f"; it gets again: {', '.join(sorted(server.returning))}" if server.returning else ""
            self._note(f"server {address} is reached{again}")
        return self._next(now)

    def lost(self, address: str, reason: str, ended: Sequence[Ended], now: int) -> list[RollStep]:
        """A server can't be reached."""
        server = self._servers[address]
        for step, _ in ended:
            server.running.pop(step.model, None)
        if server.up is not False:
            self._note(f"server {address} is lost: {reason}; trying again", logging.WARNING)
        if server.usable:
            server.absent_at = now
        server.up = False
        return self._next(now)

    def tick(self, now: int) -> list[RollStep]:
        """Time has passed; see `wake_at`."""
        return self._next(now)

    # --- outputs

    def wake_at(self, now: int) -> int | None:
        """Time of the next `tick`; None for none."""
        times = [at for each in self._servers.values() if each.up for _, at in each.pauses.values()]
        times += [
            server.absent_at + self._grace_ns
            for server in self._servers.values()
            if not (server.usable or server.gone)
        ]
        return min((at for at in times if at > now), default=None)

    def load_result(self, name: str) -> ConchError | bool:
        """Result of a roll: its error, or True once all servers that can have the model do; else False."""
        model = self._models.get(name)
        if model is None:
            return True  # dropped meanwhile
        if model.error is not None:
            return model.error
        if not model.servers:
            return InvalidArgumentError(f"no server can have model '{name}': {model.problem}")
        servers = [each for address in model.servers if (each := self._servers[address]).usable]
        if not servers:
            where = ", ".join(model.servers)
            return UnreachableError(f"model '{name}' has to wait: {where} can't be reached or drain")
        return all(server.has(name, model.generation) for server in servers)

    def unload_result(self, name: str) -> ConchError | bool:
        """Result of an unload: its error, or True once no server that is up has the model; else False."""
        if name in self._unload_errors:
            return self._unload_errors[name]
        return not any(
            server.up and (name in server.doomed or name in server.running)
            for server in self._servers.values()
        )

    @property
    def reached(self) -> bool:
        """True if any server is reached."""
        return any(server.up for server in self._servers.values())

    @property
    def serving(self) -> dict[str, list[str]]:
        """The servers of each model that is served, as far as they can be reached."""
        found: dict[str, list[str]] = {}
        for server in self._servers.values():
            for name in server.copies if server.up else ():
                found.setdefault(name, []).append(server.address)
        return found

    # --- what servers show

    def _end(self, server: ServerState, step: RollStep, error: BaseException | None, now: int) -> None:
        """Processes the end of a step."""
        name = step.model
        server.running.pop(name, None)
        if isinstance(error, UnreachableError):
            self._pause(server, name, now)  # it is reached again already
            return
        server.returning.discard(name)
        outcome = LoadOutcome.DONE if error is None else outcome_of(error)
        if outcome is LoadOutcome.DONE:
            server.pauses.pop(name, None)
            if step.kind == "unload":
                server.copies.pop(name, None)
                server.doomed.discard(name)
                self._changed(name)
            else:
                server.copies[name] = step.generation
                if name not in self._models:
                    server.doomed.add(name)  # dropped meanwhile
                self._changed(name)
            return
        assert error is not None
        shown = self._shown(server, without_details(error, f"the model could not be {step.kind}ed"))
        self._note(
            f"server {server.address} could not {step.kind} model '{name}': {shown.message}", logging.WARNING
        )
        if step.kind == "unload":
            self._unload_errors[name] = shown
            self._pause(server, name, now)
            return
        if outcome is LoadOutcome.TRANSIENT:
            self._pause(server, name, now)
        model = self._models.get(name)
        if model is None or model.generation != step.generation:
            return  # it has changed since
        model.error, model.held = shown, outcome is LoadOutcome.FAILED
        others = [each.address for each in self._servers.values() if each.up and name in each.copies]
        if model.held and others:
            self._note(
                f"model '{name}' is held, as {server.address} could not load it; what they have serves on: "
                f"{', '.join(others)}",
                logging.WARNING,
            )

    def _pause(self, server: ServerState, name: str, now: int) -> None:
        failures = server.pauses.get(name, (0, 0))[0]
        server.pauses[name] = failures + 1, now + min(FIRST_RETRY_NS << min(failures, 10), LAST_RETRY_NS)

    def _shown(self, server: ServerState, error: ConchError) -> ConchError:
        if len(self._servers) == 1:
            return error
        named = type(error)(f"server {server.address}: {getattr(error, 'reason', error.message)}")
        named.__cause__ = error.__cause__  # says whether it is transient
        return named

    def _compare(self, server: ServerState, sight: Sight, new_life: bool) -> None:
        """Takes in what others have loaded and unloaded."""
        server.sizes = {name: size for name, size in sight.serving.items() if size is not None}
        for name in sight.serving.keys() - server.copies.keys() - server.running.keys():
            server.copies[name] = 0
            server.refused.discard(name)
            if name in self._models:
                continue
            if new_life:
                self.strangers = True
            else:
                self._note(f"model '{name}' was loaded on {server.address} by others")
                self._changed(name)
        for name in server.copies.keys() - sight.serving.keys() - server.running.keys():
            del server.copies[name]
            server.doomed.discard(name)
            if name in self._models and not sight.draining:
                self._note(f"model '{name}' was unloaded from {server.address} by others")
                server.refused.add(name)
            self._changed(name)

    def _changed(self, name: str) -> None:
        serves = any(name in server.copies for server in self._servers.values())
        self.changes.append(Change(name, serves))

    # --- what follows

    def _next(self, now: int) -> list[RollStep]:
        for server in self._servers.values():
            if not (server.usable or server.gone) and now - server.absent_at >= self._grace_ns:
                server.gone = True
                self._note(
                    f"server {server.address} stays away: its models are placed elsewhere", logging.WARNING
                )
        self._place()
        steps: list[RollStep] = []
        for step in self._unloads(now):
            self._servers[step.server].running[step.model] = step
            steps.append(step)
        for name, model in self._models.items():
            load = self._load(name, model, now)
            if load is not None:
                self._servers[load.server].running[name] = load
                steps.append(load)
        return steps

    def _unloads(self, now: int) -> Iterator[RollStep]:
        for server in self._servers.values():
            for name in sorted(server.copies) if server.up else ():
                if name in server.running or server.paused(name, now):
                    continue
                if name in server.doomed or self._is_surplus(server, name):
                    yield RollStep("unload", server.address, name)

    def _is_surplus(self, server: ServerState, name: str) -> bool:
        """True if a copy isn't placed here, and all placed copies serve the current generation."""
        model = self._models.get(name)
        if model is None or server.draining or server.address in model.servers or not model.servers:
            return False
        placed = [self._servers[address] for address in model.servers]
        return not model.problem and all(each.up and each.has(name, model.generation) for each in placed)

    def _load(self, name: str, model: ModelState, now: int) -> RollStep | None:
        if any(name in server.running for server in self._servers.values() if server.up):
            return None
        servers = [server for address in model.servers if (server := self._servers[address]).usable]
        targets = [
            server
            for server in servers
            if server.copies.get(name) != model.generation
            and name not in server.running
            and not server.paused(name, now)
            and (not model.held or name in server.returning)
        ]
        if not targets:
            return None
        server = min(targets, key=lambda each: name in each.copies)  # the first of those without it
        replaces = name in server.copies
        if replaces and (
            any(each.paused(name, now) for each in servers)
            or any(
                each is not server and (each.replacing or self._returns(each))
                for each in self._servers.values()
            )
        ):
            return None
        return RollStep("load", server.address, name, model.generation, replaces)

    def _returns(self, server: ServerState) -> bool:
        """True if a server that was started again lacks models that it has not yet tried to load."""
        return server.usable and any(
            name in self._models and server.address in self._models[name].servers
            for name in server.returning - server.copies.keys()
        )

    def _place(self) -> None:
        placement = self.placement()
        for name, model in self._models.items():
            servers, problem = placement.servers[name], placement.problems.get(name, "")
            if servers != model.servers and servers and len(self._servers) > 1:
                self._note(f"model '{name}' is placed on {', '.join(servers)}")
            if problem and problem != model.problem:
                self._note(f"model '{name}': {problem}", logging.WARNING)
            model.servers, model.problem = servers, problem

    def placement(self) -> Placement:
        """Places the wanted models on the servers, by their current states."""
        present = [server for server in self._servers.values() if not server.gone]
        return place(
            {name: self._demand(name, model, present) for name, model in self._models.items()},
            [self._room(server) for server in present],
        )

    def _demand(self, name: str, model: ModelState, present: Sequence[ServerState]) -> Demand:
        rule = self._rules.rule_of(name)
        holders = [server.address for server in present if name in server.copies]
        # Servers that have it before those that only should.
        keep = [
            *(address for address in model.servers if address in holders),
            *(address for address in holders if address not in model.servers),
            *(address for address in model.servers if address not in holders),
        ]
        # What was measured holds until something else is measured.
        model.bytes = max((each.sizes.get(name, 0) for each in present), default=0) or model.bytes
        size = model.bytes if rule.memory is None else rule.memory
        return Demand(rule.replicas, rule.labels, size, model.parts, tuple(keep), frozenset(holders))

    def _room(self, server: ServerState) -> Room:
        used = sum(server.sizes.get(name, 0) for name in server.copies if name not in self._models)
        refused = frozenset(server.refused)
        return Room(server.address, server.spec.labels, server.spec.memory, used, refused, not server.usable)

    def _note(self, text: str, level: int = logging.INFO) -> None:
        self.notes.append(Note(text, level))
