"""The access log: one line for each request, whatever becomes of it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.core import (
    Answers,
    Execute,
    Instance,
    LoadedModel,
    echo,
    make_request,
    make_spec,
)
from tests.support.sharing import shared_object

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching
from conch.core.tensor import Tensor
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions
from conch.observability.logging.access_log import AccessLog, AccessRecord, json_line, text_line
from conch.observability.logging.line_writer import LineWriter
from conch.observability.logging.log_settings import AccessLogOptions
from conch.observability.request_watch import RequestWatches
from conch.observability.tracing.trace_settings import TraceSettings
from conch.observability.tracing.tracer import Tracer


class Clock:
    """Time that goes on by itself: a microsecond at each look, and what a test adds."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class From:
    """A client's call."""

    read_ns = 0
    path = ""
    access = None

    def __init__(self, client: str) -> None:
        self.client = client

    def header(self, name: str) -> str:
        return ""

    def add_response_metadata(self, name: str, value: str) -> None:
        """Nothing reads it."""


class Place:
    """A model with an access log."""

    def __init__(self, model: Model, clock: Clock, steps: bool = False) -> None:
        self.model = model
        self.clock = clock
        self.stream = io.StringIO()
        self.access = AccessLog(AccessLogOptions(), lambda: steps, self.stream)
        self.watches = RequestWatches(self.access, Tracer(TraceSettings()), clock)

    def submit(self, request: InferenceRequest, client: str = "c") -> InferenceRequest:
        """Submits a request as a front end does, and runs what there is."""
        self.watches.begin(request, self.model, "grpc", From(client), 100)
        try:
            runner = self.model.submit(request, True)
        except (InvalidArgumentError, UnavailableError) as error:
            self.watches.refuse(request, error, "grpc", From(client), 100, 0)
            return request
        if runner is not None:
            runner.run_inline()
        return request

    def lines(self) -> list[dict[str, Any]]:
        """All lines, at the end."""
        assert self.access.close()
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@contextmanager
def serving(
    execute: Execute = echo, instance_class: type[Instance] = Instance, **changes: Any
) -> Iterator[Place]:
    clock = Clock()
    model = Model.create(make_spec(**changes), LoadedModel(execute, instance_class), clock)
    place = Place(model, clock)
    try:
        yield place
    finally:
        model.close()
        place.access.close()


def test_what_waits_is_as_large_as_clients_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    with serving() as place:
        monkeypatch.setattr(LineWriter, "put", lambda writer, record, size: sizes.append(size))
        long = "x" * 100_000
        place.submit(make_request(id=long))
        unknown = InferenceRequest(long, long, {}, lambda *answer: None, 0)
        place.watches.refuse(unknown, InvalidArgumentError(long), "grpc", From("c"), 0, 0)
    assert sizes[0] >= 100_000 and sizes[1] >= 200_000  # texts of errors are cut


def test_one_line_says_it_all() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        place.clock.now_ns += 10_000
        batch.compute_input_end_ns = place.clock()
        place.clock.now_ns += 100_000
        batch.compute_output_start_ns = place.clock()
        place.clock.now_ns += 20_000
        return echo(batch)

    with serving(execute, max_batch_size=8, batching=DynamicBatching()) as place:
        request = make_request(rows=3, id="one")
        place.submit(request)
        (line,) = place.lines()
    assert line.pop("ts").endswith("+00:00")
    times = {name: line.pop(name) for name in list(line) if name.endswith("_us")}
    assert line == {
        "protocol": "grpc",
        "client": "c",
        "id": "one",
        "model": "m",
        "version": "1",
        "code": "OK",
        "rows": 3,
        "batch_size": 3,
        "responses": 1,
        "bytes_in": 100,
        "bytes_out": 0,
    }
    assert times["compute_input_us"] == 11
    assert times["compute_infer_us"] == 101
    assert times["compute_output_us"] == 21
    assert 0 < times["queue_us"] < 10
    assert times["total_us"] == place.clock.now_ns // 1000 or times["total_us"] > 133


def test_a_batch_of_several_requests() -> None:
    with serving(max_batch_size=8, batching=DynamicBatching()) as place:
        requests = [make_request(rows=rows) for rows in (1, 2, 4)]
        for request in requests:
            place.watches.begin(request, place.model, "http", From("c"), 0)
        runner = place.model.submit(requests[0], True)
        assert runner is not None
        assert place.model.submit(requests[1], True) is None
        assert place.model.submit(requests[2], True) is None
        runner.run_inline()
        lines = place.lines()
    assert [(line["rows"], line["batch_size"]) for line in lines] == [(1, 7), (2, 7), (4, 7)]


def test_a_model_that_fails() -> None:
    def fail(batch: Batch) -> list[InferenceResponse | None]:
        raise InvalidArgumentError("no\n such input")

    with serving(fail) as place:
        place.submit(make_request())
        (line,) = place.lines()
    assert (line["code"], line["error"], line["responses"]) == ("INVALID_ARG", "no\n such input", 1)
    assert line["batch_size"] == 1


def test_requests_that_are_refused() -> None:
    with serving(max_batch_size=2) as place:
        request = place.submit(make_request(rows=3))
        assert not request.completed
        place.watches.refuse(None, InvalidArgumentError("malformed"), "http", From("d"), 7, 0)
        place.watches.refuse(
            make_request(name="gone", version="4"), UnavailableError("gone"), "grpc", From("e"), 8, 0
        )
        large, malformed, gone = place.lines()
    assert (large["code"], large["model"], large["version"]) == ("INVALID_ARG", "m", "1")
    assert (large["batch_size"], large["queue_us"]) == (0, 0)
    assert (malformed["model"], malformed["client"], malformed["bytes_in"]) == ("", "d", 7)
    assert (gone["model"], gone["version"], gone["error"]) == ("gone", "4", "gone")


def test_requests_that_are_cancelled() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        for request in batch.requests:
            place.model.cancel(request)  # the client goes while its request runs
        return echo(batch)

    with serving(execute) as place:
        waiting = make_request(id="waiting")
        place.watches.begin(waiting, place.model, "grpc", From("c"), 0)
        runner = place.model.submit(waiting, True)
        assert runner is not None
        place.clock.now_ns += 5_000_000
        place.model.cancel(waiting)
        runner.run_inline()
        place.submit(make_request(id="running"))
        lines = place.lines()
    assert [(line["id"], line["code"], line["batch_size"]) for line in lines] == [
        ("waiting", "CANCELLED", 0),
        ("running", "CANCELLED", 1),
    ]
    assert lines[0]["queue_us"] >= 5000


def test_a_request_with_many_responses_has_one_line() -> None:
    def execute(batch: Batch) -> None:
        for request in batch.requests:
            for _ in range(3):
                place.clock.now_ns += 1_000_000
                tensor = Tensor.from_array("OUT", request.inputs["IN"].numpy())
                request.respond(InferenceResponse([tensor]), False)
            assert not place.stream.getvalue()
            request.respond(None, True)

    with serving(execute, decoupled=True) as place:
        answers = Answers()
        request = make_request(answers)
        place.watches.begin(request, place.model, "grpc-stream", From("c"), 0)
        place.model.submit(request)
        assert answers.wait(1)
        place.model.close()
        (line,) = place.lines()
    assert (line["code"], line["responses"], line["protocol"]) == ("OK", 3, "grpc-stream")
    assert line["compute_infer_us"] >= 3000
    assert line["compute_output_us"] == 0


def test_a_model_that_answers_after_its_batch() -> None:
    kept: list[InferenceRequest] = []

    def execute(batch: Batch) -> None:
        kept.extend(batch.requests)

    with serving(execute) as place:
        place.submit(make_request())
        place.clock.now_ns += 7_000_000
        kept[0].respond(InferenceResponse([]), True)
        (line,) = place.lines()
    assert line["code"] == "OK"
    assert line["compute_infer_us"] >= 7000


def test_models_nobody_watches_are_not_looked_at() -> None:
    with serving() as place:
        request = make_request()
        runner = place.model.submit(request, True)
        assert runner is not None
        runner.run_inline()
        assert not place.model.statistics.watched
        assert request.watch is None


WORD = r'"(?:[^"\\]|\\.)*"|[^\s"/]+'
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def record(**changes: Any) -> AccessRecord:
    numbers = dict.fromkeys(
        (name for name in AccessRecord.__slots__ if name.endswith(("_us", "_in", "_out"))), 7
    )
    fields = {
        "ts": 0.5,
        "protocol": "http",
        "client": "10.0.0.1:5",
        "id": "",
        "model": "m",
        "version": "1",
        "code": "OK",
        "error": "",
        "rows": 1,
        "batch_size": 4,
        "responses": 1,
    }
    return AccessRecord(**{**fields, **numbers, **changes})


def test_a_line_of_text() -> None:
    assert text_line(record(id="a b", code="INTERNAL", error='x\n"y"')) == (
        '1970-01-01T00:00:00.500000+00:00 http 10.0.0.1:5 m/1 INTERNAL id="a b" rows=1 batch=4 responses=1 '
        'in=7 out=7 queue=7 input=7 infer=7 output=7 total=7 error="x\\n\\"y\\""'
    )


@pytest.mark.parametrize("line_of", [json_line, text_line])
@given(fields=st.fixed_dictionaries(dict.fromkeys(("client", "id", "model", "version", "error"), TEXTS)))
@example({"client": "c", "id": "", "model": "m", "version": "1\n1970-01-01T00:00:00+00:00 grpc", "error": ""})
@example({"client": "unix:/a b", "id": "", "model": "m/7", "version": "", "error": ""})
def test_no_client_writes_lines_or_words_of_its_own(
    line_of: Callable[[AccessRecord], str], fields: dict[str, str]
) -> None:
    line = line_of(record(**fields))
    assert line.splitlines() == [line]
    if line_of is json_line:
        found = json.loads(line)
        assert {name: found.get(name, "") for name in fields} == fields
        return
    words = re.fullmatch(
        rf"\S+ http ({WORD}) ({WORD})(?:/({WORD}))? OK id=({WORD}) rows=1 .*?(?: error=(.*))?", line
    )
    assert words is not None, line
    client, model, version, request_id, error = (_unquoted(word or "") for word in words.groups())
    assert (client, model, version, request_id) == tuple(
        fields[name] for name in ("client", "model", "version", "id")
    )
    assert error == fields["error"]


def _unquoted(word: str) -> str:
    return str(json.loads(word)) if word.startswith('"') else word


def test_the_documentation_lists_the_fields() -> None:
    text = (Path(__file__).parents[4] / "docs" / "logging.md").read_text()
    _, _, access = text.partition("## The access log")
    documented = re.findall(r"^\| `([\w.*]+)` \|", access, re.MULTILINE)
    assert documented == ["gen_ai.*" if name == "facts" else name for name in AccessRecord.__slots__]


@pytest.mark.parametrize(("size", "code"), [(64, "OK"), (3, "INTERNAL")])
def test_the_outcome_is_what_comes_of_outputs_in_regions(size: int, code: str) -> None:
    """And nothing is between a model and its client's memory, or it could not write there directly."""
    with shared_object(4096) as memory, closing(Regions()) as regions, serving() as place:
        regions.register_system("r", memory.key, 0, 4096)
        request = make_request()
        uses = RegionBindings(regions)
        for tensor in place.model.spec.model_outputs:
            uses.output("r", 0, size, tensor.name)
        uses.attach(request)
        place.watches.begin(request, place.model, "grpc", From("c"), 100)
        assert request.responder is uses
        runner = place.model.submit(request, True)
        if runner is not None:
            runner.run_inline()
        (line,) = place.lines()
        assert [region.users for region in regions.system_regions()] == [0]
    assert line["code"] == code
