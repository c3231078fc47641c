"""Requests that are rescheduled, and clients that hold up what is sent to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.core import WAIT_S
from tests.support.servers import eventually
from tests.support.worker_models import ONE, spec_of
from tests.support.workers import SlowClient, request_of, worker

from conch.core.spec import SequenceBatching

pytestmark = pytest.mark.process

AGAIN = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if request.request_id() != "again":
                sender.send(flags=1)
                continue
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if not getattr(self, "sent", False):
                self.sent = True
                {first}
"""


@pytest.mark.parametrize(
    "first", ["threading.Timer(0.05, sender.send, [None, 1]).start()", "sender.send(None, 1)"]
)
def test_a_request_that_was_answered_may_run_again(tmp_path: Path, first: str) -> None:
    """The server may not have seen the answer when it sends the request again."""
    sequence = SequenceBatching("OLDEST", iterative=True)
    spec = spec_of(tmp_path, AGAIN.format(first=first), decoupled=True, sequence=sequence)
    with worker(spec) as running:
        request, answers = request_of("again", IN=ONE)
        running.run(request)
        assert answers.wait(1)
        assert request.rescheduled
        request.rescheduled = False
        running.run(request)
        assert request.rescheduled  # as in process, where it is not run once more
        other, others = request_of("other", IN=ONE)
        running.run(other)
        assert others.wait(1)
        assert running.process.poll() is None
        assert running.link.table.rescheduled == set() and running.link.table.open == {}


def test_a_thread_that_waits_for_a_client_ends_when_its_request_is_forgotten(tmp_path: Path) -> None:
    first = """
                self.thread = threading.Thread(target=lambda: [sender.send(answer()) for _ in range(1000)])
                self.thread.start()

    def finalize(self):
        self.thread.join()
"""
    sequence = SequenceBatching("OLDEST", iterative=True)
    spec = spec_of(tmp_path, AGAIN.format(first=first.strip()), decoupled=True, sequence=sequence)
    with worker(spec) as running:
        slow = SlowClient()
        request = slow.request("again", IN=ONE)
        running.run(request)
        eventually(lambda: len(slow.calls) == 96, "the window is used up")
        request.completed = True
        other, _ = request_of("other", IN=ONE)
        running.run(other)
        assert running.link.close(WAIT_S), "the thread has ended, as finalize waits for it"


def test_what_a_client_allows_while_a_response_is_sent_is_not_lost(tmp_path: Path) -> None:
    """However the thread that reads and the one that sends take turns."""
    model = """
    def execute(self, requests):
        from conch.workers.host import response_writer
        from conch.workers.host.hosted_requests import HostedRequest
        (running,) = (each for each in gc.get_objects() if type(each) is HostedRequest)
        units = response_writer.units
        def allowed(outputs):
            running.granted += 1  # as the thread that reads does
            return units(outputs)
        response_writer.units = allowed
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(200):
                sender.send(answer())
            sender.send(flags=1)
"""
    with worker(spec_of(tmp_path, model, decoupled=True)) as running:
        slow = SlowClient()
        running.run(slow.request(IN=ONE))
        assert slow.wait(1)
        assert len(slow.calls) == 201
