"""Rollouts of whole servers: bad candidates are aborted, good ones promoted, a killed server goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from operator import gt
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.loading import write_number
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, serving_process, tensor
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.slow, pytest.mark.process]

MODEL = """
import itertools, os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    requests = itertools.count(1)

    def execute(self, requests):
        number = next(self.requests)
        {act}
        out = pb_utils.Tensor("OUT", np.ones(1, np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
GOOD = "pass"
INSTANCES = "instance_group { count: 4 } version_policy { latest { num_versions: 1 } }"
GUARD = {"requests": 40, "errors": 0.005, "slower": 0.1}


def write_version(repository: Path, version: int, act: str = GOOD) -> None:
    directory = repository / "m" / str(version)
    directory.mkdir(exist_ok=True)
    (directory / "model.py").write_text(MODEL.format(act=act))


class Site:
    """A server whose model gets requests from both protocols until `end`."""

    def __init__(self, server: ServerProcess) -> None:
        key = {"key": "secret"}
        self._http = httpx.Client(base_url=f"http://{server.http_address}", timeout=WAIT_S, headers=key)
        self._server = server
        self._over = Event()
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self._ended = [0] * 4  # requests of each client
        self._pool = ThreadPoolExecutor(4)  # as many as instances, so that no request waits
        clients = enumerate((self._ask_grpc, self._ask_http) * 2)
        self._running = [self._pool.submit(ask, number) for number, ask in clients]

    def _ask_grpc(self, number: int) -> None:
        with client_of(self._server) as client:
            while not self._over.is_set():
                try:
                    found = client.infer("m", [tensor("IN", np.ones(1, np.float32))])
                except InferenceServerException as error:
                    self.errors.append(str(error))
                else:
                    self.answers[found.get_response().model_version] += 1
                self._ended[number] += 1

    def _ask_http(self, number: int) -> None:
        inputs = [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]
        while not self._over.is_set():
            reply = self._http.post("/v2/models/m/infer", json={"inputs": inputs}).json()
            if "error" in reply:
                self.errors.append(reply["error"])
            else:
                self.answers[reply["model_version"]] += 1
            self._ended[number] += 1

    def rollout(self, action: str = "", body: Any = None) -> Any:
        path = f"/v2/repository/models/m/rollout{action}"
        reply = self._http.get(path) if not action and body is None else self._http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def wait(self, *states: str) -> Any:
        def reached() -> Any:
            found = self.rollout()
            return found if found["state"] in states else None

        return eventually(reached, f"the rollout is {states}", WAIT_S)

    def answered_by(self, version: str) -> None:
        """Waits until requests that begin now are answered by a version, and those that run have ended."""
        before, ended = self.answers[version], [each + 1 for each in self._ended]
        eventually(
            lambda: self.answers[version] > before + 50 and all(map(gt, self._ended, ended)),
            f"version {version} answers",
            WAIT_S,
        )

    def end(self) -> None:
        self._over.set()
        self._pool.shutdown()
        for each in self._running:
            each.result()
        self._http.close()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_number(tmp_path / "models", "m", extra=INSTANCES, versions=(1,))
    write_version(tmp_path / "models", 1)
    return tmp_path / "models"


EXPLICIT = ("--model-control-mode=explicit", "--load-model=m")
POLL = (
    *("--model-control-mode=poll", "--repository-poll-secs=0.2"),
    "--http-restricted-api=model-repository:key=secret",
)


@contextmanager
def site_of(
    repository: Path, *flags: str, mode: tuple[str, ...] = EXPLICIT
) -> Iterator[tuple[Site, ServerProcess]]:
    arguments = ["--http-port=0", "--metrics-port=0", *mode, *flags]
    with serving_process(repository, flags=arguments) as server:
        site = Site(server)
        try:
            yield site, server
        finally:
            site.end()


@pytest.mark.parametrize(
    ("stable", "candidate", "errors", "reason"),
    [
        (GOOD, "if number % 33 == 0: raise ValueError('odd')", 0.005, "errors"),
        # In neighbouring buckets of the histogram, whose edge is 537 ms.
        ("time.sleep(0.28)", "time.sleep(0.55)", 0.005, "slower"),
        # With a limit that is above what the ends of workers fail.
        (GOOD, "if number % 20 == 0: os._exit(3)", 0.5, "the workers of version 2 fail again and again"),
    ],
    ids=["fails", "is slow", "crashes"],
)
def test_a_bad_candidate_is_aborted(
    repository: Path, stable: str, candidate: str, errors: float, reason: str
) -> None:
    write_version(repository, 1, stable)
    with site_of(repository) as (site, _):
        write_version(repository, 2, candidate)
        declared = {"candidate": 2, "steps": ["50% 8s", "60% 1h"], "guard": {**GUARD, "errors": errors}}
        site.rollout(body={"rollout": declared})
        found = site.wait("ABORTED")
        assert reason in found["reason"], found
        site.answered_by("1")
        site.errors.clear()
        begun = Counter(site.answers)
        site.answered_by("1")
        assert site.answers["2"] == begun["2"], "the candidate gets requests after the abort"
        assert site.errors == []


def test_a_good_candidate_is_promoted_and_rolled_back_without_a_failure(repository: Path) -> None:
    with site_of(repository) as (site, _):
        write_version(repository, 2)
        declared = {"candidate": 2, "steps": ["20% 1s", "50% 1s"], "guard": {"requests": 40, "errors": 0.05}}
        site.rollout(body={"rollout": {**declared, "keep": "1h"}})
        site.wait("BAKING")
        site.answered_by("2")
        site.rollout("/rollback")
        site.wait("ABORTED")
        site.answered_by("1")
        write_version(repository, 3)
        site.rollout(body={"rollout": {**declared, "candidate": 3, "keep": "1s"}})
        site.wait("DONE")
        site.answered_by("3")
        site.end()
        assert site.errors == []
        assert set(site.answers) == {"1", "2", "3"}


STATES = {
    "STEP": ((), {"STEP"}),
    "PAUSED": (("/pause",), {"PAUSED"}),
    "BAKING": (("/promote",), {"BAKING"}),
    "ABORTED": (("/abort",), {"ABORTED"}),
    "rolled back": (("/promote", "/rollback"), {"ABORTED"}),
}


@pytest.mark.parametrize("state", STATES)
def test_a_killed_server_goes_on_where_it_was(repository: Path, tmp_path: Path, state: str) -> None:
    actions, after = STATES[state]
    flags = (f"--state-directory={tmp_path / 'state'}",)
    with site_of(repository, *flags) as (site, server):
        write_version(repository, 2)
        site.rollout(body={"rollout": {"candidate": 2, "steps": ["20% 1h", "50% 1h"], "keep": "1h"}})
        site.wait("STEP")
        for action in actions:
            site.rollout(action)
        before = site.wait(*after)
        site.end()
        server.kill()
    with site_of(repository, *flags) as (site, _):
        found = site.wait(*after)
        keys = ("id", "stable", "candidate", "previous", "step", "refused")
        assert {key: found[key] for key in keys} == {key: before[key] for key in keys}
        assert found["weight"] <= before["weight"]
        site.answered_by(str(before["stable"]))
        assert site.errors == []
        held = {"ABORTED": {"1"}, "BAKING": {"2"}}.get(found["state"], {"1", "2"})
        assert set(site.answers) <= held


def test_files_that_change_in_any_state_fail_no_request(repository: Path) -> None:
    edits = count(1)

    def change(version: int, act: str = GOOD) -> None:
        write_version(repository, version, f"{act}  # edit {next(edits)}")

    with site_of(repository, mode=POLL) as (site, _):

        def anew(*states: str) -> None:
            """Waits until another rollout than the one before is in a state."""
            number = site.rollout()["id"]
            change(2)
            eventually(lambda: site.rollout()["id"] > number, "a further rollout")
            site.wait(*states)

        def reloaded(version: int) -> None:
            """Changes a version that stays where it is, and waits until it counts its requests from zero."""

            def requests() -> int:
                sides = site.rollout()["sides"]
                return sum(each["requests"] for each in sides if each["version"] == version)

            eventually(lambda: requests() > 100, f"requests for version {version}", WAIT_S)
            before, rollout = requests(), site.rollout()
            change(version)
            eventually(lambda: requests() < before, f"version {version} is loaded again", WAIT_S)
            after = site.rollout()
            assert [after[key] for key in ("id", "state")] == [rollout[key] for key in ("id", "state")]

        write_version(repository, 2)
        declared = {"candidate": 2, "steps": ["20% 1h"], "keep": "1h"}
        site.rollout(body={"labels": {"stable": 1}, "rollout": declared})
        site.wait("STEP")
        reloaded(1)
        anew("STEP")
        site.rollout("/pause")
        anew("STEP")
        change(2, "raise ValueError('odd')\n  odd")
        site.wait("FAILED")
        anew("STEP")
        site.rollout("/promote")
        site.wait("BAKING")
        reloaded(2)
        site.rollout("/rollback")
        site.wait("ABORTED")
        anew("STEP")
        site.end()
        assert site.errors == []
