"""What models do to the worker that they run in, and what becomes of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.core import WAIT_S, Answers
from tests.support.servers import eventually
from tests.support.workers import NoCalls, Running, batch_of, model_spec, request_of, worker

from conch.backends.python import utils as pb_utils
from conch.core.clock import monotonic_ns
from conch.core.errors import NotFoundError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec, SequenceBatching, TensorSpec
from conch.core.tensor import Tensor

HEAD = """
import atexit, gc, json, logging, os, resource, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(value=1.0):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])

def says(value):
    text = json.dumps(value).encode()
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], np.object_))])

def squeeze():
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + 3 * 2**20, resource.RLIM_INFINITY))
"""
ONE = np.ones(1, np.float32)


def spec_of(directory: Path, model: str, **more: Any) -> ModelSpec:
    more.setdefault("inputs", (TensorSpec("IN", "FP32", (-1,)),))
    more.setdefault("outputs", (TensorSpec("OUT", "FP32", (-1,)),))
    return model_spec(directory, f"{HEAD}\n\nclass TritonPythonModel:\n{model}", **more)


def said(running: Running) -> Any:
    """What a model says in a text."""
    return json.loads(running.infer(IN=ONE)["OUT"][0])


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
            assert not running.link._checks.ask().wait()
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
        assert running.link._checks.ask().wait()
        running.infer(IN=ONE)
        begun = monotonic_ns()
        assert not running.link._checks.ask().wait()
        assert monotonic_ns() - begun < 4e9


def test_a_worker_that_can_not_handle_a_message_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It must not go on with nobody reading."""
    model = """
    def execute(self, requests):
        for each in gc.get_objects():
            if type(each).__name__ == "Host":
                def broken(*arguments):
                    raise MemoryError
                for kind in list(each._handlers):
                    each._handlers[kind] = broken
        time.sleep(0.5)
        return [answer() for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        begun = running.begin(batch_of(request_of(IN=ONE)[0]))
        assert not running.link._checks.ask().wait()
        with pytest.raises(Exception, match="is not healthy"):
            begun.result()
        assert running.process.wait(WAIT_S) == 5
    assert "MemoryError" in capfd.readouterr().err


INTERRUPTED = """
    def execute(self, requests):
        host = next(each for each in gc.get_objects() if type(each).__name__ == "Host")
        host._watch.end()  # so that this thread reads
        channel, real = host._channel, host._channel.receive
        class Alarm(Exception):
            pass
        def receive(*arguments):
            if threading.current_thread() is not threading.main_thread():
                return real(*arguments)
            channel.receive = real
            {how}
            raise Alarm  # as the handler of a signal may
        channel.receive = receive
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
    """What it said would be waited for."""
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
        from conch.workers.wire import ResponseRecord
        encode = ResponseRecord.encode
        def broken(record):
            if record.parameters:
                raise ValueError("it is broken")
            return encode(record)
        ResponseRecord.encode = broken
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
        assert "a response can't be sent: it is broken" in response.error.message


def no_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no thread be started that hands something over."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name.endswith("-hand"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)


def test_responses_are_handed_over_also_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in range(300):
                sender.send(answer(value))
            sender.send(flags=1)
"""
    with worker(spec_of(tmp_path, model, decoupled=True)) as running:
        no_hands(monkeypatch)
        requests = [request_of(IN=ONE) for _ in range(3)]
        running.run(*(request for request, _ in requests))
        for _, answers in requests:
            assert answers.wait(1)
            values = [each.outputs[0].numpy().item() for _, each, _ in answers.calls if each is not None]
            assert values == list(range(300))


def test_a_request_that_is_lost_where_no_thread_can_be_started_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = """
    def execute(self, requests):
        self.senders = [request.get_response_sender() for request in requests]
        threading.Timer(0.01, os._exit, [1]).start()
"""
    with worker(spec_of(tmp_path, model, decoupled=True)) as running:
        no_hands(monkeypatch)
        request, answers = request_of(IN=ONE)
        running.begin(batch_of(request))
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
            no_hands(patch)
            assert "can't start a thread" in said(running)
        assert said(running) is False


# --- rescheduled requests --------------------------------------------------------------------------------

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
        assert running.link._table.again == set() and running.link._table.open == {}


class Blocked(Answers):
    """A client that reads nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        super().__call__(request, response, final)
        assert self.go_on.wait(WAIT_S)


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
        blocked = Blocked()
        inputs = {"IN": Tensor.from_array("IN", ONE)}
        request = InferenceRequest("m", "", inputs, blocked, monotonic_ns(), "again")
        try:
            running.run(request)
            (entry,) = running.link._table.open.values()
            eventually(lambda: len(entry._queue) == 95, "the window is used up")
            request.answered = True
            other, others = request_of("other", IN=ONE)
            running.run(other)
            assert others.wait(1)
            assert running.link.close(5.0)
        finally:
            blocked.go_on.set()


def test_what_a_client_allows_while_a_response_is_sent_is_not_lost(tmp_path: Path) -> None:
    """However the thread that reads and the one that sends take turns."""
    model = """
    def execute(self, requests):
        from conch.workers import wire
        from conch.workers.host.loop import Host
        host = next(each for each in gc.get_objects() if type(each) is Host)
        units = wire.units
        class Allowed:
            class message:
                fields = wire.encode_credit(1)
        def allowed(outputs):
            for number in list(host._requests._by_number):
                host._on_credit(number, Allowed)
            return units(outputs)
        wire.units = allowed
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(200):
                sender.send(answer())
            sender.send(flags=1)
"""
    with worker(spec_of(tmp_path, model, decoupled=True)) as running:
        blocked = Blocked()
        inputs = {"IN": Tensor.from_array("IN", ONE)}
        try:
            running.run(InferenceRequest("m", "", inputs, blocked, monotonic_ns()))
        finally:
            blocked.go_on.set()
        assert blocked.wait(1)
        assert len(blocked.calls) == 201


# --- forks -----------------------------------------------------------------------------------------------


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


def test_processes_of_multiprocessing_do_their_work(tmp_path: Path) -> None:
    model = """
    def execute(self, requests):
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            total = sum(pool.map(abs, range(-100, 0)))
        return [answer(total) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        for _ in range(2):
            assert running.infer(IN=ONE)["OUT"].tolist() == [5050]


# --- types -----------------------------------------------------------------------------------------------

MISTAKES = [
    "pb_utils.InferenceRequest(5, ['OUT'], [])",
    "pb_utils.InferenceRequest(None, ['OUT'], [])",
    "pb_utils.InferenceRequest('b', None, [])",
    "pb_utils.InferenceRequest('b', 'OUT', [])",
    "pb_utils.InferenceRequest('b', [1], [])",
    "pb_utils.InferenceRequest('b', ['OUT'], None)",
    "pb_utils.InferenceRequest('b', ['OUT'], [], request_id=5)",
    "pb_utils.InferenceRequest('b', ['OUT'], [], model_version='1')",
    "pb_utils.InferenceRequest('b', ['OUT'], [], flags='1')",
    "pb_utils.InferenceRequest('b', ['OUT'], [], priority=1.5)",
    "pb_utils.InferenceRequest('b', ['OUT'], [], priority='high')",
    "pb_utils.InferenceRequest('b', ['OUT'], []).set_flags(1.5)",
    "pb_utils.Tensor(5, np.ones(1))",
    "pb_utils.Tensor(None, np.ones(1))",
    "pb_utils.Tensor.from_dlpack(5, np.ones(1))",
    "pb_utils.TritonError(ValueError('what'))",
    "pb_utils.TritonError(5)",
    "pb_utils.TritonError('what', 'INTERNAL')",
    "pb_utils.MetricFamily(5, '')",
    "pb_utils.MetricFamily('a_family', None)",
    "pb_utils.MetricFamily('a_family', '', 2).Metric(buckets=['x'])",
    "pb_utils.MetricFamily('a_family', '', 1).Metric().set('x')",
]


class Echo(NoCalls):
    """A server with a model that answers with its first input."""

    def __init__(self) -> None:
        self.requests: list[InferenceRequest] = []

    def find(self, request: InferenceRequest) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(name="b", version=1, decoupled=False))

    def submit(self, request: InferenceRequest, may_lead: bool = False, model: Any = None) -> None:
        self.requests.append(request)
        request.respond(InferenceResponse([Tensor.from_array("OUT", ONE)]), True)


def test_wrong_types_are_told_to_the_model(tmp_path: Path) -> None:
    model = f"""
    def execute(self, requests):
        told = []
        for mistake in {MISTAKES!r}:
            try:
                made = eval(mistake)
                told.append("made")
                made.exec()
                told[-1] = "run"
            except Exception as error:
                told.append(type(error).__name__ + ": " + str(error))
        return [says(told) for _ in requests]
"""
    with worker(spec_of(tmp_path, model), Echo()) as running:
        for _ in range(2):
            told = said(running)
            assert [text.split(":")[0] for text in told] == ["TypeError"] * len(MISTAKES)
            assert "requested_output_names" in told[3] and "priority" in told[9]
        assert running.process.poll() is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_types_are_told_to_models_in_process_too(mistake: str) -> None:
    with pytest.raises(TypeError, match=r"must be|not iterable"):
        eval(mistake, {"pb_utils": pb_utils, "np": np})


def test_types_that_are_taken_for_others(tmp_path: Path) -> None:
    """As pybind takes them: what is no int but can stand for one, and bytes."""
    model = """
    def execute(self, requests):
        one = np.int64(1)
        pb_utils.InferenceRequest(
            b"b", (b"OUT",), [pb_utils.Tensor(b"IN", np.ones(1))], request_id=b"id", correlation_id=True,
            model_version=one, flags=one, timeout=True, priority=one).exec()
        family = pb_utils.MetricFamily(b"of_a_test", b"what it is", pb_utils.MetricFamily.HISTOGRAM)
        family.Metric({}, np.array([1, 2], np.float32)).observe(np.float32(1))
        return [answer() for _ in requests]
"""
    server = Echo()
    with worker(spec_of(tmp_path, model), server) as running:
        running.infer(IN=ONE)
    (request,) = server.requests
    assert (request.model_name, request.requested, list(request.inputs)) == ("b", ("OUT",), ["IN"])
    assert (request.id, request.correlation_id, request.model_version) == ("id", 1, "1")
    assert (request.sequence_start, request.timeout_us, request.priority) == (True, 1, 1)
    assert type(request.correlation_id) is int and type(request.timeout_us) is int


def test_questions_that_make_no_sense_are_answered_with_an_error(tmp_path: Path) -> None:
    model = """
    def execute(self, requests):
        from conch.backends.python import metrics
        server, told = metrics._families._server, []
        for question in ({"ask": "find", "name": 5}, {"ask": "family", "name": 5},
                         {"ask": "metric", "labels": 5}, {"ask": "value", "number": "x"}):
            try:
                server.ask(question.pop("ask"), **question)
                told.append("answered")
            except Exception as error:
                told.append(str(error))
        return [says(told) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        assert said(running) == [
            "'name' of a question is not a text",
            "a family of metrics has a name and a description",
            "labels are names and texts",
            "there is no such metric",
        ]


def test_too_many_metrics_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.workers.metrics._MOST", 5)
    model = """
    def execute(self, requests):
        family, held = pb_utils.MetricFamily("of_another_test", ""), []
        try:
            while len(held) < 10:
                held.append(family.Metric({"a": str(len(held))}))
        except pb_utils.TritonModelException as error:
            return [says([len(held), str(error)]) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        for _ in range(2):
            count, text = said(running)
            assert count == 4
            assert text == "Error when creating Metric: a model may hold 5 metrics and families at a time"


# --- logs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["channel.Channel, '_put'", "blocks.Block, '__init__'"])
def test_a_thread_may_log_while_it_sends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: str
) -> None:
    """As finalizers do, which the garbage collector runs wherever it is."""
    model = f"""
    def execute(self, requests):
        from conch.workers import blocks, channel
        def log_in(owner, name):
            function = getattr(owner, name)
            def logging_first(*arguments):
                setattr(owner, name, function)
                for each in gc.get_objects():
                    if type(each) is blocks.Pool:
                        each._dropped.append(2**30)  # something to be told with the next message
                logging.getLogger("finalizer").error("it is gone")
                return function(*arguments)
            setattr(owner, name, logging_first)
        array = np.ones(100_000, np.float32)
        log_in({inside})
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        for _ in range(2):
            begun = running.begin(batch_of(request_of(IN=ONE)[0]))
            try:
                eventually(lambda: bool(begun.outcomes), "an answer")  # noqa: B023
            except BaseException:
                running.process.kill()
                raise
    assert "it is gone" in caplog.text


# --- the rest --------------------------------------------------------------------------------------------


def test_a_model_that_has_gone_since_it_was_called(tmp_path: Path) -> None:
    """The text is that of a model that was never there."""

    class Going(Echo):
        gone = False

        def find(self, request: InferenceRequest) -> Any:
            if self.gone:
                raise NotFoundError(f"Request for unknown model: '{request.model_name}' is not found")
            return super().find(request)

    model = """
    def execute(self, requests):
        request = pb_utils.InferenceRequest("b", ["OUT"], [])
        response = request.exec()
        return [pb_utils.InferenceResponse([], error=response.error()) if response.has_error() else answer()]
"""
    server = Going()
    with worker(spec_of(tmp_path, model), server) as running:
        running.infer(IN=ONE)
        server.gone = True
        for _ in range(2):
            (response,) = running.run(request_of(IN=ONE)[0])
            assert response is not None and response.error is not None
            assert response.error.message == (
                "Model b - Error when running inference: Failed for execute the inference request. "
                "Model 'b' is not ready."
            )
