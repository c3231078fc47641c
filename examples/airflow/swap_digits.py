"""A DAG that swaps a model, checks it, watches it, and goes back: see README.md beside this file."""

import time
from datetime import timedelta

from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException
from airflow_provider_conch.hook import ConchHook
from airflow_provider_conch.sensor import ConchModelReadySensor
from airflow_provider_conch.swap import ConchModelSwapOperator

# A seven, of those that the model was not trained with.
# fmt: off
IMAGE = [
    0, 0, 2, 13, 16, 9, 0, 0,
    0, 0, 12, 12, 7, 16, 3, 0,
    0, 1, 14, 3, 0, 16, 4, 0,
    0, 0, 0, 4, 10, 16, 6, 0,
    0, 0, 0, 13, 16, 16, 9, 0,
    0, 0, 0, 5, 13, 1, 0, 0,
    0, 0, 0, 11, 9, 0, 0, 0,
    0, 0, 1, 16, 4, 0, 0, 0,
]
# fmt: on
GOLDEN = {
    "inputs": [{"name": "image", "shape": [1, 64], "datatype": "FP32", "data": IMAGE}],
    "outputs": {"digit": [7]},
}

with DAG(
    "swap_digits",
    schedule=None,
    render_template_as_native_obj=True,
    params={"model": "digits", "golden": GOLDEN, "watch_seconds": 60, "most_failures": 0.01},
):
    wait = ConchModelReadySensor(
        task_id="wait",
        model="{{ params.model }}",
        mode="reschedule",
        poke_interval=10,
        timeout=timedelta(minutes=10).total_seconds(),
    )
    swap = ConchModelSwapOperator(
        task_id="swap", model="{{ params.model }}", verify="{{ params.golden }}", timeout=600
    )

    @task.branch
    def watch(swapped: dict, params: dict | None = None) -> str | None:
        """Goes on with `go_back` if too many requests fail, else skips the rest."""
        until = time.monotonic() + params["watch_seconds"]
        while time.monotonic() < until:
            counts = ConchHook().statistics(params["model"], swapped["to"])["inference_stats"]
            failed, answered = counts["fail"]["count"], counts["success"]["count"]
            if failed > max(5, params["most_failures"] * (failed + answered)):
                print(f"version {swapped['to']} has failed {failed} of {failed + answered} requests")
                return "go_back"
            time.sleep(1)
        return None

    go_back = ConchModelSwapOperator(
        task_id="go_back",
        model="{{ params.model }}",
        version="{{ ti.xcom_pull('swap')['from'] }}",
    )

    @task
    def report(swapped: dict, restored: dict) -> None:
        raise AirflowFailException(f"version {swapped['to']} failed; {restored['to']} serves again")

    wait >> swap
    watch(swap.output) >> go_back
    report(swap.output, go_back.output)
