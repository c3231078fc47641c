"""Forks of workers: they are no workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.worker_models import ONE, spec_of
from tests.support.workers import request_of, worker

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "child",
    [
        "sys.exit(7)",
        "os._exit(7)",
        "[logging.getLogger('m').error('from the child') for _ in range(20)]; sys.exit(7)",
        "pb_utils.Logger.log_info('from the child'); sys.exit(7)",
        "pb_utils.is_model_ready('other')",  # which can't be
        "return [answer() for _ in requests]",
    ],
)
def test_a_fork_of_a_worker_is_no_worker(tmp_path: Path, child: str) -> None:
    model = f"""
    def execute(self, requests):
        pid = os.fork()
        if pid == 0:
            {child}
            sys.exit(7)
        return [answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        for _ in range(2):
            expected = 0 if "return" in child else 1 if "is_model" in child else 7
            assert running.infer(IN=np.ones(100_000, np.float32))["OUT"].tolist() == [expected]
        assert running.process.poll() is None


@pytest.mark.parametrize("where", ["senders", "initialize"])
def test_a_fork_elsewhere_is_no_worker_either(tmp_path: Path, where: str) -> None:
    fork = """
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        self.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    model = f"""
    def initialize(self, args):
        {fork if where == "initialize" else ""}
        pass

    def execute(self, requests):
        for request in requests:
            request.get_response_sender()
        {fork if where == "senders" else ""}
        return [answer(self.status) for request in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        request, answers = request_of(IN=ONE)
        running.run(request)
        assert answers.wait(1)
        ((_, response, _),) = answers.calls
        assert response is not None and response.outputs[0].numpy().tolist() == [7]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing_do_their_work(tmp_path: Path, method: str) -> None:
    model = f"""
    def execute(self, requests):
        import multiprocessing
        with multiprocessing.get_context("{method}").Pool(2) as pool:
            total = sum(pool.map(abs, range(-100, 0)))
        return [answer(total) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        for _ in range(2):
            assert running.infer(IN=ONE)["OUT"].tolist() == [5050]
