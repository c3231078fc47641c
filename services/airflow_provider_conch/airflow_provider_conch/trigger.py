"""Follows a rollout until it ends, in Airflow's triggerer or in a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_conch.hook import ConchError, ConchHook, ConchUnreachableError

_SHOWN = ("id", "state", "stable", "candidate", "previous", "verdict", "reason")
_ENDED = frozenset({"IDLE", "ABORTED", "FAILED", "DONE"})


def shown(report: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a server's report that tasks return."""
    return {name: report[name] for name in _SHOWN}


async def follow(hook: ConchHook, model: str, number: int, poll_interval: float) -> dict[str, Any]:
    """Waits until a rollout has ended, also while the server can't be reached.

    Args:
        hook: The server.
        model: The model.
        number: The number of the rollout.
        poll_interval: Seconds between two looks.

    Returns:
        The last report, as by `shown`.

    Raises:
        ConchError: The model has no rollout any more, or another one.
    """
    seen = None
    while True:
        try:
            report = await asyncio.to_thread(hook.rollout, model)
        except ConchUnreachableError as error:
            hook.log.warning("%s", error)
        else:
            if report["id"] != number:
                raise ConchError(f"rollout {number} of '{model}' has ended: rollout {report['id']} has begun")
            stage = report["state"], report["step"], report["weight"]
            if stage != seen:
                hook.log.info("rollout %s of '%s': %s, step %s, %g %%", number, model, *stage)
                seen = stage
            if report["state"] in _ENDED:
                return shown(report)
        await asyncio.sleep(poll_interval)


class ConchRolloutTrigger(BaseTrigger):
    """Fires once a rollout has ended, with the server's report or the text of an error.

    Args:
        model: The model.
        number: The number of the rollout.
        poll_interval: Seconds between two looks.
        conch_conn_id: The Airflow connection.
    """

    def __init__(self, *, model: str, number: int, poll_interval: float, conch_conn_id: str) -> None:
        super().__init__()
        self.model = model
        self.number = number
        self.poll_interval = poll_interval
        self.conch_conn_id = conch_conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and its arguments."""
        return f"{__name__}.{type(self).__name__}", {
            "model": self.model,
            "number": self.number,
            "poll_interval": self.poll_interval,
            "conch_conn_id": self.conch_conn_id,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Waits for the end."""
        connection = await ConchHook.aget_connection(self.conch_conn_id)
        hook = ConchHook(self.conch_conn_id, connection)
        try:
            report = await follow(hook, self.model, self.number, self.poll_interval)
        except ConchError as error:
            yield TriggerEvent({"error": str(error)})
        else:
            yield TriggerEvent({"report": report})
        finally:
            hook.get_conn().close()
