"""Runs operators in Airflow's environment: a line of JSON for each comes in, what became of it goes out."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from airflow.sdk import BaseOperator, Connection
from airflow.sdk.exceptions import TaskDeferred
from airflow_provider_conch.hook import ConchHook
from airflow_provider_conch.rollout import ConchRolloutOperator
from airflow_provider_conch.sensor import ConchModelReadySensor
from airflow_provider_conch.swap import ConchModelSwapOperator

OPERATORS = {each.__name__: each for each in (ConchModelSwapOperator, ConchRolloutOperator)}


def run(operator: str, arguments: dict[str, Any]) -> Any:
    """Executes an operator, and its trigger if it defers."""
    task: BaseOperator = OPERATORS[operator](task_id="task", **arguments)
    try:
        return task.execute({})
    except TaskDeferred as deferred:
        return getattr(task, deferred.method_name)({}, **asyncio.run(_event(deferred.trigger)))


async def _event(trigger: Any) -> dict[str, Any]:
    path, arguments = trigger.serialize()
    assert path == f"{type(trigger).__module__}.{type(trigger).__qualname__}"
    async for event in type(trigger)(**arguments).run():
        return {"event": event.payload}
    raise AssertionError("the trigger ended without an event")


def ask(what: str, arguments: dict[str, Any]) -> Any:
    """Does what a line says."""
    if what == "test_connection":
        # As the button in Airflow's page does, by the class that the provider names for the type.
        return Connection.get(ConchHook.default_conn_name).test_connection()
    if what == "poke":
        return ConchModelReadySensor(task_id="task", **arguments).poke({})
    return run(what, arguments)


def main() -> None:
    """Answers lines until there are no more."""
    for line in sys.stdin:
        what, variables, arguments = json.loads(line)
        os.environ.update(variables)
        try:
            answer = {"result": ask(what, arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"ANSWER {json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
