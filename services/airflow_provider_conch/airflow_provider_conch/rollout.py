"""Operator that rolls out a version step by step, by the server's own state machine and guards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import requests
from airflow.configuration import conf
from airflow.sdk import BaseOperator

from airflow_provider_conch.hook import ConchError, ConchHook
from airflow_provider_conch.trigger import ConchRolloutTrigger, follow, shown

_RUNS = frozenset({"LOADING", "STEP", "PAUSED"})


class ConchRolloutOperator(BaseOperator):
    """Starts a rollout, and follows it until all requests get the candidate, or it is aborted.

    The server moves the weight, holds the guards, and goes back; this task only looks. It fails with the
    server's reason if the rollout is aborted. A rollout of the same candidate that runs already, as after a
    retry of the task, is followed as it is.

    The return value has ``id``, ``state``, ``stable``, ``candidate``, ``previous``, ``verdict`` and
    ``reason`` of the server's report.

    Args:
        model: The model.
        candidate: The version to roll out, or ``newest``.
        steps: As in ``rollout.toml``, such as ``["1% 5m", "25% 10m"]``; None for the server's.
        options: Further fields of the table ``[rollout]``, such as ``guard`` and ``keep``.
        wait: True to wait for the end.
        timeout: Seconds to wait; the rollout goes on if they pass. None for no limit.
        poll_interval: Seconds between two looks.
        deferrable: True to wait in Airflow's triggerer.
        conch_conn_id: The Airflow connection.
        arguments: Arguments of every operator.
    """

    template_fields: Sequence[str] = ("model", "candidate", "steps", "options")

    def __init__(
        self,
        *,
        model: str,
        candidate: int | str,
        steps: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        wait: bool = True,
        timeout: float | None = None,
        poll_interval: float = 10.0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        conch_conn_id: str = ConchHook.default_conn_name,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.model = model
        self.candidate = candidate
        self.steps = steps
        self.options = options
        self.wait = wait
        self.timeout = timeout
        self.poll_interval = poll_interval
        self.deferrable = deferrable
        self.conch_conn_id = conch_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Starts the rollout, and waits."""
        hook = ConchHook(self.conch_conn_id)
        report = self._start(hook)
        if not self.wait:
            return shown(report)
        number = report["id"]
        if self.deferrable:
            self.defer(
                trigger=ConchRolloutTrigger(
                    model=self.model,
                    number=number,
                    poll_interval=self.poll_interval,
                    conch_conn_id=self.conch_conn_id,
                ),
                method_name="execute_complete",
                timeout=None if self.timeout is None else timedelta(seconds=self.timeout),
            )
        waiting = follow(hook, self.model, number, self.poll_interval)
        try:
            return self._end(asyncio.run(asyncio.wait_for(waiting, self.timeout)))
        except TimeoutError:
            raise ConchError(
                f"rollout {number} of '{self.model}' has not ended within {self.timeout} s; it goes on"
            ) from None

    def execute_complete(self, context: Any, event: Mapping[str, Any]) -> dict[str, Any]:
        """Goes on after the trigger."""
        if "error" in event:
            raise ConchError(event["error"])
        return self._end(event["report"])

    def _start(self, hook: ConchHook) -> dict[str, Any]:
        candidate = self.candidate
        if isinstance(candidate, str) and candidate.isdecimal():
            candidate = int(candidate)
        try:
            report = hook.rollout(self.model)
        except ConchError as error:
            if error.status != requests.codes.not_found:
                raise
        else:
            moved = report["state"] == "BAKING" and candidate == report["stable"]
            if moved or (report["state"] in _RUNS and candidate in (report["candidate"], "newest")):
                self.log.info("rollout %s of '%s' runs already", report["id"], self.model)
                return report
        declared = {"candidate": candidate, **(self.options or {})}
        if self.steps is not None:
            declared["steps"] = list(self.steps)
        return hook.start_rollout(self.model, declared)

    def _end(self, report: Mapping[str, Any]) -> dict[str, Any]:
        if report["state"] != "DONE":
            raise ConchError(
                f"rollout {report['id']} of '{self.model}' is {report['state']}, version {report['stable']} "
                f"serves: {report['reason'].strip()}"
            )
        return dict(report)
