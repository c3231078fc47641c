"""Harm that models do to their worker, and its consequences."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.support.core import WAIT_S
from tests.support.servers import eventually
from tests.support.worker_models import ONE, said, spec_of
from tests.support.workers import NoCalls, Running, batch_of, request_of, worker

from conch.core.errors import UnavailableError

pytestmark = pytest.mark.process

# --- the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finalize", ["pass", "time.sleep(0.1)"])
def test_a_worker_that_is_closed_ends_as_python_does(tmp_path: Path, finalize: str) -> None:
    model = f"""
    def initialize(self, args):
        atexit.register(self.mark, "exit")

    def mark(self, name):
        time.sleep(0.05)
        open(os.path.join({str(tmp_path)!r}, name), "w").close()

    def execute(self, requests):
        return [answer() for _ in requests]

    def finalize(self):
        {finalize}
        threading.Timer(0.05, self.mark, ["thread"]).start()
"""
    running = Running(spec_of(tmp_path, model), NoCalls())
    try:
        running.load()
        running.infer(IN=ONE)
        assert running.link.close(WAIT_S)
        assert running.process.wait(WAIT_S) == 0
        assert (tmp_path / "exit").exists() and (tmp_path / "thread").exists()
    finally:
        running.end()


def test_threads_that_call_when_the_model_is_gone_are_told_so(tmp_path: Path) -> None:
    told = tmp_path / "told"
    model = f"""
    def execute(self, requests):
        def go():
            try:
                while True:
                    pb_utils.is_model_ready("other")
            except Exception as error:
                with open({str(told)!r}, "w") as file:
                    file.write(str(error))
        threading.Thread(target=go).start()
        return [answer() for _ in requests]
"""
    running = Running(spec_of(tmp_path, model), NoCalls())
    try:
        running.load()
        running.infer(IN=ONE)
        assert running.link.close(WAIT_S)
        assert running.process.wait(WAIT_S) == 0
        assert told.exists()
    finally:
        running.end()


def test_a_sender_that_a_model_never_let_go_of_does_not_keep_its_worker(tmp_path: Path) -> None:
    model = """
    def execute(self, requests):
        sys.kept = [request.get_response_sender() for request in requests]
        return [None] * len(requests)
"""
    running = Running(spec_of(tmp_path, model), NoCalls())
    try:
        running.load()
        request, answers = request_of(IN=ONE)
        running.run(request)
        assert running.link.close(WAIT_S)
        assert running.process.wait(WAIT_S) == 0
        assert answers.wait(1)
    finally:
        running.end()


# --- little memory ---------------------------------------------------------------------------------------


def test_a_question_for_readiness_costs_no_worker_that_can_start_no_thread(tmp_path: Path) -> None:
    model = """
    def execute(self, requests):
        squeeze()
        return [answer() for _ in requests]

    def is_ready(self):
        return True
"""
    with worker(spec_of(tmp_path, model)) as running:
        running.infer(IN=ONE)
        for _ in range(2):
            assert not running.link.checks.ask().wait()
            running.infer(IN=ONE)
        assert running.process.poll() is None


def test_a_check_whose_own_thread_can_not_be_started_is_answered(tmp_path: Path) -> None:
    model = """
    def initialize(self, args):
        self.start = threading.Thread.start

    def execute(self, requests):
        def start(thread):
            if thread.name.endswith("_0_0-ready"):
                raise RuntimeError("can't start new thread")
            self.start(thread)
        threading.Thread.start = start
        return [answer() for _ in requests]

    def is_ready(self):
        return True
"""
    with worker(spec_of(tmp_path, model)) as running:
        assert running.link.checks.ask().wait()
        running.infer(IN=ONE)
        check = running.link.checks.ask()
        assert not check.wait()
        assert not check.open, "it is answered, and no time limit has passed"


def test_a_worker_that_can_not_handle_a_message_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It must not go on without a reader."""
    broken = tmp_path / "broken"
    model = f"""
    def initialize(self, args):
        self.start = threading.Thread.start

    def execute(self, requests):
        def start(thread):
            if thread.name == "conch-ready":
                raise MemoryError
            self.start(thread)
        threading.Thread.start = start
        open({str(broken)!r}, "w").close()
        threading.Event().wait({WAIT_S})
"""
    with worker(spec_of(tmp_path, model)) as running:
        begun = running.start(batch_of(request_of(IN=ONE)[0]))
        eventually(broken.exists, "its threads can't be started")
        assert not running.link.checks.ask().wait()
        with pytest.raises(Exception, match="is not healthy"):
            begun.result()
        assert running.process.wait(WAIT_S) == 5
    assert "MemoryError" in capfd.readouterr().err


INTERRUPTED = """
    def execute(self, requests):
        from conch.ipc.channel import PacketChannel
        from conch.workers.host.host_reader import BackupReader
        for each in gc.get_objects():
            if type(each) is BackupReader:
                each.disarm()  # so that this thread reads
        real = PacketChannel.receive
        class Alarm(Exception):
            pass
        def receive(*arguments):
            if threading.current_thread() is not threading.main_thread():
                return real(*arguments)
            PacketChannel.receive = real
            {how}
            raise Alarm  # as the handler of a signal may
        PacketChannel.receive = receive
        raised = 0
        for _ in range(3):
            try:
                pb_utils.is_model_ready("other")
            except Alarm:
                raised += 1
        return [answer(raised) for _ in requests]
"""


def test_a_handler_that_raises_when_a_message_has_come_ends_the_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else the worker would wait for the message that was lost."""
    with worker(spec_of(tmp_path, INTERRUPTED.format(how="real(*arguments)"))) as running:
        with pytest.raises(UnavailableError, match="is not healthy"):
            running.run(request_of(IN=ONE)[0])
        assert running.process.wait(WAIT_S) == 5
    assert "Alarm" in capfd.readouterr().err


def test_a_handler_that_raises_when_none_has_come_is_the_models_matter(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, INTERRUPTED.format(how="pass"))) as running:
        for _ in range(3):
            assert running.infer(IN=ONE)["OUT"].tolist() == [1]
        assert running.process.poll() is None


def test_a_response_that_can_not_be_sent_ends_its_request_all_the_same(tmp_path: Path) -> None:
    model = """
    def execute(self, requests):
        from conch.workers.host import response_writer
        encode = response_writer.text_of
        def broken(response):
            if response is not None and response.parameters:
                raise ValueError("it is broken")
            return encode(response)
        response_writer.text_of = broken
        for request in requests:
            parameters = {"a": 1}
            response = pb_utils.InferenceResponse(answer().output_tensors(), parameters=parameters)
            request.get_response_sender().send(response, 1)
"""
    with worker(spec_of(tmp_path, model, decoupled=True)) as running:
        request, answers = request_of(IN=ONE)
        running.run(request)
        assert answers.wait(1)
        ((_, response, final),) = answers.calls
        assert final and response is not None and response.error is not None
        assert response.error.message == "the response could not be sent"


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no thread be started for what may block."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name.endswith("-blocking"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)


def test_a_request_that_is_lost_where_no_thread_can_be_started_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = """
    def execute(self, requests):
        self.senders = [request.get_response_sender() for request in requests]
        threading.Timer(0.01, os._exit, [1]).start()
"""
    with worker(spec_of(tmp_path, model, decoupled=True)) as running:
        no_threads(monkeypatch)
        request, answers = request_of(IN=ONE)
        running.start(batch_of(request))
        assert answers.wait(1)
        running.wait_lost()


def test_a_question_that_no_thread_can_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = """
    def execute(self, requests):
        try:
            return [says(pb_utils.is_model_ready("other")) for _ in requests]
        except Exception as error:
            return [says(str(error)) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        with monkeypatch.context() as patch:
            no_threads(patch)
            assert "can't start a thread" in said(running)
        assert said(running) is False


# --- logs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["channel.SentTexts, 'encode'", "blocks.Block, '__init__'"])
def test_a_thread_may_log_while_it_sends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: str
) -> None:
    """As finalizers do, which the garbage collector runs wherever it is."""
    model = f"""
    def execute(self, requests):
        from conch.ipc import blocks, channel
        def log_in(owner, name):
            function = getattr(owner, name)
            def logging_first(*arguments):
                setattr(owner, name, function)
                for each in gc.get_objects():
                    if type(each) is blocks.Pool:
                        each.dropped.append(2**30)  # something to be told with the next message
                logging.getLogger("finalizer").error("it is gone")
                return function(*arguments)
            setattr(owner, name, logging_first)
        array = np.ones(100_000, np.float32)
        log_in({inside})
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        for _ in range(2):
            begun = running.start(batch_of(request_of(IN=ONE)[0]))
            try:
                eventually(lambda: bool(begun.outcomes), "an answer")  # noqa: B023
            except BaseException:
                running.process.kill()
                raise
    assert "it is gone" in caplog.text
