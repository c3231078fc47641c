"""`conch.testing`: models that do not answer, and models that can't run where they are to."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.conch_testing.unit.test_testing import CONFIG, ROW, model
from tests.support.backend_harness import opened
from tests.support.servers import eventually, past_deadline

import conch.testing
from conch.testing import ModelError

DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"
NOTICES = """
    def execute(self, requests):
        while not requests[0].is_cancelled():
            threading.Event().wait(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.ones((1, 2), np.float32))])]
"""
KEEPS = """
    kept = []

    def execute(self, requests):
        self.kept.append(requests[0].get_response_sender())
        self.kept[-1].send(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.ones((1, 2), np.float32))]))
"""
NEVER_ENDS = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        while not requests[0].is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.ones((1, 2), np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PLACEMENTS = pytest.mark.parametrize("placement", ["in_process", "worker"])


@PLACEMENTS
@pytest.mark.parametrize(
    ("body", "config"),
    [
        (NOTICES, CONFIG),
        (NOTICES.replace("def ", "async def "), CONFIG),
        (KEEPS, DECOUPLED),
        (NEVER_ENDS, DECOUPLED),
    ],
)
def test_a_deadline_ends_the_waiting(
    tmp_path: Path, body: str, config: str, placement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch_testing.model_repository.GRACE_S", 0.5 if body == KEEPS else 60.0)
    with conch.testing.load(model(tmp_path, body, config), placement=placement) as loaded:
        seen: list[ModelError] = []

        def run(deadline_s: float) -> None:
            with pytest.raises(ModelError, match="Deadline Exceeded") as info:
                loaded.run({"A": ROW}, deadline_s=deadline_s)
            assert info.value.code == "DEADLINE_EXCEEDED"
            seen.append(info.value)

        past_deadline(run, lambda: not loaded.decoupled or seen[-1].responses)
        if loaded.decoupled:
            assert seen[-1].responses[0]["SUM"].tolist() == [[1, 1]]
        late = loaded.run_all([{"A": ROW}] * 2, deadline_s=0.1)
        assert [each.code for each in late] == ["DEADLINE_EXCEEDED"] * 2
        stream = loaded.stream({"A": ROW}, deadline_s=0.1)
        with pytest.raises(ModelError, match="Deadline Exceeded"):
            list(stream)


def test_in_time_is_in_time(tmp_path: Path) -> None:
    assert conch.testing.run(model(tmp_path), {"A": ROW}, deadline_s=300)["SUM"].tolist() == [[2, 4]]


HANGS = """
    go_on = threading.Event()
    finalized = False

    def initialize(self, args):
        from tests.support.backend_harness import opened

        opened.append(type(self))

    def execute(self, requests):
        type(self).requests = requests
        self.go_on.wait()
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def finalize(self):
        type(self).finalized = True
"""


def test_a_model_that_hangs_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("conch_testing.model_repository.GRACE_S", 0.1)
    loaded = conch.testing.load(model(tmp_path, HANGS))
    kind = opened.pop()

    def run(deadline_s: float) -> None:
        with pytest.raises(ModelError, match="Deadline Exceeded"):
            loaded.run({"A": ROW}, deadline_s=deadline_s)

    past_deadline(run, lambda: hasattr(kind, "requests"))
    assert kind.requests[0].is_cancelled()
    loaded.close()
    assert "model 'm' still runs a request whose deadline has passed" in caplog.text
    kind.go_on.set()
    eventually(lambda: not model_threads(), "its thread ends with its request")
    assert not kind.finalized
    loaded.close()
    assert kind.finalized


def model_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("conch-m-")]


@pytest.mark.parametrize(
    ("files", "parameter", "text"),
    [
        ({"1/requirements.txt": ""}, "", "requirements.txt' asks for an environment of its own"),
        ({}, "CONCH_ENV_A", "parameter 'CONCH_ENV_A' asks for an environment of its own"),
        ({}, "CONCH_MEMORY_LIMIT_MB", "'CONCH_MEMORY_LIMIT_MB' needs a process of the model's own"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"config": {"max_batch_size": 2}}])
@pytest.mark.process
def test_models_that_need_a_worker_say_how_to_have_one(
    tmp_path: Path, files: dict[str, str], parameter: str, text: str, more: Any
) -> None:
    config = CONFIG
    for key, value in ((parameter, "1000"), ("CONCH_PLACEMENT", "worker")):
        config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' if key else ""
    directory = model(tmp_path, config=config)
    for name, contents in files.items():
        (directory / name).write_text(contents)
    with pytest.raises(ModelError) as info:
        conch.testing.run(directory, {"A": ROW}, **more)
    told = str(info.value)
    assert text in told
    assert told.endswith("in this process by default: give run or load placement='worker'")
    assert "CONCH_PLACEMENT" not in told and "--backend-config" not in told
    if not files:  # nothing to install
        outputs = conch.testing.run(directory, {"A": ROW}, placement="worker", **more)
        assert outputs["SUM"].tolist() == [[2, 4]]
