"""Begin and end of links: models that do not load, workers that are closed or lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest
from tests.conch.unit.workers.models import SOURCE, floats, source_of, spec_of
from tests.support.core import WAIT_S
from tests.support.workers import NoCalls, Running, batch_of, request_of, worker

from conch.core.errors import InternalError, UnavailableError
from conch.ipc.channel import Kind

pytestmark = pytest.mark.process


def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    source = source_of("return []", "    def initialize(self, args):\n        raise ValueError('not so')")
    with pytest.raises(InternalError, match="ValueError: not so"), worker(spec_of(tmp_path, source)):
        pass
    os.remove(tmp_path / "m" / "1" / "model.py")
    spec = dataclasses.replace(spec_of(tmp_path, source), model_file="other.py")
    with pytest.raises(UnavailableError, match="Python model file not found"), worker(spec):
        pass


def test_finalize_is_called_before_the_worker_ends(tmp_path: Path) -> None:
    file = tmp_path / "finalized"
    source = SOURCE + f"    def finalize(self):\n        open({str(file)!r}, 'w').close()\n"
    with worker(spec_of(tmp_path, source)) as running:
        running.infer(IN=floats())
        assert running.link.close(WAIT_S)
        assert file.exists()
        assert running.process.wait(WAIT_S) == 0
    assert running.lost == []


def test_a_worker_that_does_not_finalize_in_time(tmp_path: Path) -> None:
    source = SOURCE + "    def finalize(self):\n        time.sleep(100)\n"
    with worker(spec_of(tmp_path, source)) as running:
        assert not running.link.close(0.1)
        assert running.process.wait(WAIT_S) == 3  # its socket is closed
    assert running.lost == []


ENDS = {
    "exits": "os._exit(7)",
    "is killed": "os.kill(os.getpid(), 9)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "closes its socket": (
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        if 'socket' in os.readlink(f'/proc/self/fd/{fd}'):\n"
        "            os.close(int(fd))\n"
        "    except OSError:\n"
        "        pass\n"
        "time.sleep(0.1)"
    ),
    "writes garbage": (
        "import socket\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        if 'socket' in os.readlink(f'/proc/self/fd/{fd}'):\n"
        "            socket.socket(fileno=os.dup(int(fd))).send(b'garbage' * 100)\n"
        "    except OSError:\n"
        "        pass\n"
        "time.sleep(100)"
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_when_a_worker_ends_only_what_it_had_fails(tmp_path: Path, how: str) -> None:
    with worker(spec_of(tmp_path, source_of(ENDS[how])), NoCalls()) as running:
        requests = [request_of(f"id{number}", IN=floats(100_000))[0] for number in range(2)]
        with pytest.raises(UnavailableError) as raised:
            running.run(*requests)
        assert raised.value.message.startswith(
            "Failed to process the request(s) for model instance 'm_0_0', message: Stub process 'm_0_0' is "
            "not healthy."
        )
        reason = running.wait_lost()
        assert ("can't be understood" in reason) == (how == "writes garbage")
        assert [each.request_ids for each in running.link.in_flight()] == [("id0", "id1")]
        with pytest.raises(UnavailableError):  # at once
            running.run(request_of(IN=floats())[0])


def test_requests_that_are_open_when_a_worker_ends_are_answered(tmp_path: Path) -> None:
    body = """
self.senders = [request.get_response_sender() for request in requests]
self.senders[0].send(pb_utils.InferenceResponse([]))
"""
    for decoupled in (True, False):
        source = source_of(body + "\nreturn None")
        with worker(spec_of(tmp_path, source, decoupled=decoupled)) as running:
            first, answered = request_of(IN=floats())
            second, answers = request_of(IN=floats())
            running.run(first, second)
            running.process.kill()
            assert answers.wait(1)
            assert answers.calls[-1][1] is not None
            assert type(answers.calls[-1][1].error) is UnavailableError
            assert answered.wait(1)
            running.wait_lost()
            assert len(answered.calls) == 1 + decoupled


def test_a_worker_that_ends_while_it_loads(tmp_path: Path) -> None:
    source = source_of("return []", "    def initialize(self, args):\n        os._exit(3)")
    with pytest.raises(UnavailableError, match="is not healthy"), worker(spec_of(tmp_path, source)):
        pass


def test_a_worker_whose_server_is_gone_ends_although_its_model_hangs(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, source_of("time.sleep(1000)"))) as running:
        begun = running.start(batch_of(request_of(IN=floats())[0]))
        running.link.channel.shut_down()
        assert running.process.wait(WAIT_S) == 3
        with pytest.raises(UnavailableError):
            begun.result()


def test_a_stopped_worker_holds_up_nobody(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, source_of("return []"))) as running:
        os.kill(running.process.pid, signal.SIGSTOP)
        try:
            request, _ = request_of(IN=floats(20_000))
            begun = running.start(batch_of(request))
            for _ in range(5000):  # more than the socket takes
                running.link.notify(Kind.CANCEL, 10**9)
            running.link.lose("it hangs")
            with pytest.raises(UnavailableError, match="it hangs"):
                begun.result()
            assert running.wait_lost() == "it hangs"
        finally:
            os.kill(running.process.pid, signal.SIGCONT)


def test_a_worker_of_another_version(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from conch.ipc import codec; codec.VERSION = 99\n"
        "from conch.workers.host.worker_loop import serve; serve(int(sys.argv[1]))"
    )
    running = Running(spec_of(tmp_path), NoCalls(), code)
    try:
        with pytest.raises(UnavailableError, match="the worker speaks version 99 of the protocol"):
            running.load()
    finally:
        running.end()


def test_losing_and_closing_twice_and_before_anything(tmp_path: Path) -> None:
    running = Running(spec_of(tmp_path), NoCalls())
    try:
        running.link.lose("no need")
        running.link.lose("really")
        with pytest.raises(UnavailableError, match="no need"):
            running.load()
        running.link.close(0)
    finally:
        running.end()


def test_what_is_begun_while_it_is_found_out_how_a_worker_ended_is_told_so_too(tmp_path: Path) -> None:
    asked, known = threading.Event(), threading.Event()

    def explain(reason: str) -> UnavailableError:
        asked.set()
        assert known.wait(WAIT_S)
        return UnavailableError("it was killed")

    with worker(spec_of(tmp_path)) as running:
        running.link.explain = explain
        os.kill(running.process.pid, signal.SIGKILL)
        assert asked.wait(WAIT_S)
        begun = running.start(batch_of(request_of(IN=floats())[0]))
        assert begun.outcomes == []
        known.set()
        with pytest.raises(UnavailableError, match="it was killed"):
            begun.result()
        with pytest.raises(UnavailableError, match="it was killed"):  # and so is what comes later
            running.infer(IN=floats())
