"""Records of the console: log lines, traces, configs without secrets, borrowed trace settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from tests.support.forked_logs import log_in_a_fork

from conch.core.errors import InternalError, InvalidArgumentError
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_options import trace_options
from conch.observability.tracing.trace_ring import TraceRing
from conch.observability.tracing.trace_settings import TraceSetting, TraceSettings, TraceValues
from conch_console.config_view import masked_config, masked_text
from conch_console.log_ring import LogRing
from conch_console.trace_sampling import TraceSampling
from conch_control.config.parse import parse_config

log = logging.getLogger("conch.test.console")


@pytest.fixture
def ring() -> Iterator[LogRing]:
    ring = LogRing(lines=10)
    ring.install()
    log.setLevel(logging.INFO)
    yield ring
    ring.remove()
    log.setLevel(logging.NOTSET)


def test_lines_are_bounded_and_numbered(ring: LogRing) -> None:
    for number in range(25):
        log.info("line %d %s", number, "x" * 5000)
    records = ring.newest(100)
    assert [record["n"] for record in records] == list(range(16, 26))
    assert ring.count == 25 and max(len(record["message"]) for record in records) < 2100
    assert [record["n"] for record in ring.newest(2, after=20)] == [24, 25]


def test_lines_name_models_and_crashes(ring: LogRing) -> None:
    record = logging.LogRecord("conch.python_model.own", logging.WARNING, "", 0, "%d", ("no number",), None)
    ring.handle(record)
    log.info("loading: simple:1, then 'other_0_1'")
    logging.getLogger("conch.workers.supervision.supervisor").error("worker of 'm' died")
    try:
        raise ValueError("<script>")
    except ValueError:
        log.exception("failed")
    own, loading, crash, failed = ring.newest(10)
    assert own["models"] == ["own"] and own["message"] == "%d"
    assert loading["models"] == ["other", "other_0_1", "simple"]
    assert crash["crash"] and crash["models"] == ["m"] and not own["crash"]
    assert failed["trace"].endswith("ValueError: <script>")


@pytest.mark.process
def test_a_child_logs_although_its_parent_forked_while_another_thread_logged() -> None:
    setup = "from conch_console.log_ring import LogRing\nhandler = LogRing()\nhandler.install()"
    assert log_in_a_fork(setup, "handler.newest(1)[0]['message'] == 'from the child'") == 0


def trace(number: int, error: bool = False) -> Trace:
    made = Trace(number, TraceSetting(TraceValues(timestamps=True)), None, "http", number, 1)
    made.model, made.version, made.reason = "m", 1, "sampled"
    made.received_ns, made.started_ns, made.queued_ns, made.ended_ns = 1000, 2000, 3000, 9000
    made.error = InternalError("x" * 5000) if error else None
    child = Trace(number, made.setting, made, "ensemble-step", number, 2)
    child.model, child.started_ns, child.ended_ns = "part", 4000, 8000
    return made


def test_traces_are_bounded_in_number_and_bytes() -> None:
    ring = TraceRing(most=3)
    ring.write([trace(number) for number in range(5)])
    assert [json.loads(text)["id"] for text in ring.newest()] == [4, 3, 2]
    newest = json.loads(ring.newest()[0])
    assert [(row[0], row[1]) for row in newest["rows"]][:1] == [(0, "m (1)")]
    assert "part (0)" in [row[1] for row in newest["rows"]]
    small = TraceRing(most_bytes=len(ring.newest()[0]) * 2)
    small.write([trace(number) for number in range(10, 15)])
    assert len(small.newest()) == 1 or sum(map(len, small.newest())) <= len(ring.newest()[0]) * 2
    failing = TraceRing()
    failing.write([trace(1, error=True)])
    assert len(json.loads(failing.newest()[0])["error"]) == 500


SECRETS = """name: "m"
parameters { key: "api_token" value: { string_value: "hush" } }
parameters [ { key: "size" value: { string_value: "7" } },
  { value { string_value: 'hu'
    'sh' } key: 'db_PASSWORD' } ]
optimization { execution_accelerators { gpu_execution_accelerator [ { name: "x"
  parameters { key: "secret" value: "hush" } parameters { key: "a" value: "b" } } ] } }
model_repository_agents { agents [ { name: "x" parameters: { key: "access-key" value: "hush" } } ] }
"""


def test_secrets_of_configs_are_hidden_and_lines_stay() -> None:
    text = masked_text(SECRETS)
    assert "hush" not in text and "sh'" not in text
    assert text.count("\n") == SECRETS.count("\n") and text.count('"***"') == 4
    assert '"7"' in text and '"b"' in text
    config = masked_config(parse_config(SECRETS, "config.pbtxt"))
    assert "hush" not in str(config) and str(config).count("***") == 4
    assert parse_config(text, "config.pbtxt") == config


def settings(**values: object) -> TraceSettings:
    return TraceSettings(TraceValues(**values), without_file=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["", "m"])
def test_sampling_puts_back_what_it_borrowed(model: str) -> None:
    now = [0]
    traces = settings()
    traces.update({"trace_level": ["TIMESTAMPS"], "trace_rate": ["500"]}, "m")
    before = traces.settings(model)
    sampling = TraceSampling(traces, lambda: now[0])
    sampling.sample_next(model, 2)
    sampling.sample_next(model, 2)  # asked for twice: the settings of before are kept
    setting = traces.of(model)
    assert sampling.state() == {model: 2}
    assert [setting.sample() for _ in range(3)] == [True, True, False]
    sampling.settle()
    assert traces.settings(model) == before and sampling.state() == {}
    sampling.sample_next(model, 2)
    now[0] = 601 * 10**9
    sampling.settle()
    assert traces.settings(model) == before


def test_the_ring_is_enough_for_times_and_not_for_tensors() -> None:
    level = "level=TENSORS"
    with pytest.raises(InvalidArgumentError, match="trace file"):
        settings().update({"trace_level": ["TENSORS"]})
    assert not trace_options([level], {}, without_file=True).values.on
    assert trace_options(["level=TIMESTAMPS"], {}, without_file=True).values.timestamps


def test_sampling_leaves_alone_what_others_have_changed() -> None:
    traces = settings()
    sampling = TraceSampling(traces)
    sampling.sample_next("", 2)
    traces.update({"trace_rate": ["7"], "trace_level": ["TIMESTAMPS"]})
    sampling.settle()
    assert traces.settings()["trace_rate"] == ("7",) and sampling.state() == {}
