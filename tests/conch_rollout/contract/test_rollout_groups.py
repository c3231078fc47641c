"""Rollouts of two models of one group: what ensembles and calls of models see of them."""

from __future__ import annotations

from ast import literal_eval
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.support.calling import run, write_script
from tests.support.loading import model_text, write_number
from tests.support.servers import IN_PROCESS, client_of, eventually, free_port, serving, tensor, write_model

from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions

pytestmark = pytest.mark.slow

DECLARED = """
[labels]
stable = 1
[rollout]
group = "pair"
steps = ["50% 1h"]
sticky = ["header:x-user"]
"""
PAIR = """
    platform: "ensemble"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "FIRST" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "SECOND" data_type: TYPE_FP32 dims: [ 1 ] }
    ensemble_scheduling {
      step {
        model_name: "first" model_version: -1
        input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "FIRST" }
      }
      step {
        model_name: "second" model_version: -1
        input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "SECOND" }
      }
    }
"""
CALLS = (
    "result = [call(name, 1).exec().output_tensors()[0].as_numpy().item() for name in ('first', 'second')]"
)
USERS = [f"user-{number}" for number in range(30)]


def test_a_pair_moves_together_and_is_mixed_after_an_abort_of_one(tmp_path: Path) -> None:
    def write_version(model: str, version: int) -> None:
        directory = tmp_path / model / str(version)
        directory.mkdir()
        (directory / "model.py").write_text(model_text(version))

    for name in ("first", "second"):
        write_number(tmp_path, name)
        (tmp_path / name / "rollout.toml").write_text(DECLARED)
    write_model(tmp_path, "pair", PAIR, {})
    write_script(tmp_path)
    port = free_port()
    flags = [
        f"--control-port={port}",
        "--model-control-mode=explicit",
        "--load-model=pair",
        "--load-model=script",
        IN_PROCESS,
    ]
    with (
        serving(tmp_path, flags=flags) as server,
        client_of(server) as client,
        closing(ModelControlClient(ConnectionOptions(f"127.0.0.1:{port}"))) as control,
    ):

        def candidate(model: str, version: int) -> int:
            """Brings a version; returns the number of its rollout."""
            write_version(model, version)
            client.load_model(model)
            eventually(lambda: control.rollout(model).state == "STEP", "it is at its step")
            assert control.rollout(model).candidate == version
            return control.rollout(model).id

        def pairs() -> set[tuple[int, int]]:
            """The versions that users see, the same by the ensemble and by calls."""
            seen = set()
            for user in USERS:
                headers = {"x-user": user}
                found = client.infer("pair", [tensor("IN", np.ones(1, np.float32))], headers=headers)
                pair = tuple(int(found.as_numpy(name)[0]) for name in ("FIRST", "SECOND"))
                assert tuple(map(int, literal_eval(run(client, CALLS, headers=headers)))) == pair
                seen.add((pair[0], pair[1]))
            return seen

        assert candidate("first", 2) == 1
        control.update_rollout("first", "abort")
        eventually(lambda: control.rollout("first").state == "ABORTED", "it has ended")
        # One has had a rollout before, and the other has not.
        assert candidate("first", 3) == candidate("second", 2) == 2
        assert pairs() == {(1, 1), (3, 2)}
        control.update_rollout("first", "abort")
        assert pairs() == {(1, 1), (1, 2)}
