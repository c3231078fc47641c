"""The example's DAG, by `airflow dags test`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.support.airflow_runs import WITH_AIRFLOW, AirflowDags
from tests.support.loading import write_number
from tests.support.servers import ROOT, LocalServer, serving

pytestmark = WITH_AIRFLOW

MOODY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if given[0] > {most}:
            return pb_utils.InferenceResponse([], pb_utils.TritonError("too much"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])
"""


def request(value: float) -> dict[str, object]:
    return {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [value]}]}


@contextmanager
def traffic(server: LocalServer) -> Iterator[None]:
    """Clients that ask for what is too much for some versions, until the end of the block."""
    enough = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=f"http://{server.http_address}") as client:
            while not enough.wait(0.01):
                client.post("/v2/models/m/infer", json=request(5.0))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_the_dag_swaps_and_goes_back(tmp_path: Path) -> None:
    model = write_number(tmp_path / "models", "m")

    def add(version: int, most: float) -> None:
        (model / str(version)).mkdir()
        (model / str(version) / "model.py").write_text(MOODY.format(most=most))

    airflow = AirflowDags(tmp_path / "airflow", ROOT / "examples/airflow")
    conf = {"model": "m", "golden": {**request(1.0), "outputs": {"OUT": [1.0]}}, "watch_seconds": 3}
    flags = ("--model-control-mode=explicit", "--load-model=m")
    with serving(tmp_path / "models", flags=flags) as server:

        def run() -> tuple[bool, str]:
            return airflow.test("swap_digits", f"conch://{server.http_address}", conf)

        def serves(version: int) -> bool:
            path = f"/v2/models/m/versions/{version}/ready"
            return httpx.get(f"http://{server.http_address}{path}").is_success

        add(2, most=10.0)
        with traffic(server):
            succeeded, output = run()
            assert succeeded, output
            assert serves(2) and not serves(1)
            # It answers the golden request, but not those of the clients.
            add(3, most=2.0)
            succeeded, output = run()
        assert "version 3 failed; 2 serves again" in output
        assert not succeeded, output
        assert serves(2) and not serves(3)
