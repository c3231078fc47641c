"""Log and trace settings: what can be read and changed, and what is refused with which text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.log_defaults import LOG_SETTINGS

from conch.core.errors import ConchError, InvalidArgumentError, UnsupportedError
from conch.observability.logging.log_settings import LogControl, LogOptions
from conch.observability.tracing.trace_settings import TraceSettings

TRACE = {
    "trace_mode": ("triton",),
    "trace_file": ("",),
    "trace_level": ("OFF",),
    "trace_rate": ("1000",),
    "trace_count": ("-1",),
    "log_frequency": ("0",),
}


class Log:
    """Log settings, and what was made of them."""

    def __init__(self, options: LogOptions | None = None) -> None:
        self.applied: list[LogOptions] = []
        self.control = LogControl(options or LogOptions(), self.applied.append)


def test_log_settings_at_the_start() -> None:
    assert Log().control.settings() == LOG_SETTINGS
    options = LogOptions(info=False, verbose=3, format="ISO8601", file=Path("/var/log/conch"))
    changed = {
        "log_file": "/var/log/conch",
        "log_info": False,
        "log_verbose_level": 3,
        "log_format": "ISO8601",
    }
    assert Log(options).control.settings() == {**LOG_SETTINGS, **changed}


@pytest.mark.parametrize(
    ("changes", "attributes"),
    [
        ({"log_info": False}, {"info": False}),
        ({"log_warning": False, "log_error": False}, {"warning": False, "error": False}),
        ({"log_verbose_level": 4294967295}, {"verbose": 4294967295}),
        ({"log_format": "ISO8601"}, {"format": "ISO8601"}),
    ],
)
def test_log_settings_are_changed(changes: dict[str, Any], attributes: dict[str, Any]) -> None:
    log = Log()
    assert log.control.update(changes) == log.control.settings() == {**LOG_SETTINGS, **changes}
    (applied,) = log.applied
    assert {name: getattr(applied, name) for name in attributes} == attributes


def test_other_names_change_nothing() -> None:
    log = Log()
    assert log.control.update({"bogus": True}) == log.control.update({}) == LOG_SETTINGS
    assert log.applied == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"log_info": "x"}, "expect boolean for 'log_info'"),
        ({"log_warning": 1}, "expect boolean for 'log_warning'"),
        ({"log_error": None}, "expect boolean for 'log_error'"),
        ({"log_verbose_level": True}, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": "1"}, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": None}, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": -1}, "expect a number from 0 to 4294967295 for 'log_verbose_level', got: -1"),
        ({"log_format": True}, "expect string for 'log_format'"),
        ({"log_format": "iso8601"}, "invalid argument for log_format, got: iso8601"),
    ],
)
def test_wrong_log_settings_change_nothing(changes: dict[str, Any], text: str) -> None:
    log = Log()
    with pytest.raises(InvalidArgumentError) as raised:
        log.control.update({"log_info": False, **changes})
    assert raised.value.message == text
    assert log.control.settings() == LOG_SETTINGS
    assert log.applied == []


def test_the_log_file_can_not_be_changed() -> None:
    log = Log()
    with pytest.raises(UnsupportedError) as raised:
        log.control.update({"log_file": "", "log_info": "wrong too"})
    assert raised.value.message == "log file location can not be updated through network protocol"


def test_logs_of_the_program_around_the_server() -> None:
    control = LogControl(LogOptions(), None)
    assert control.update({}) == LOG_SETTINGS
    with pytest.raises(UnsupportedError, match="belong to the program"):
        control.update({"log_info": False})


def test_trace_settings_at_the_start() -> None:
    traces = TraceSettings()
    assert traces.settings() == traces.settings("m") == TRACE


def test_a_model_has_the_global_settings_but_for_its_own() -> None:
    traces = TraceSettings()
    assert traces.update({"trace_rate": ["7"], "trace_count": ["3"]}, "m")["trace_rate"] == ("7",)
    assert traces.update({"trace_rate": ["9"], "log_frequency": ["4"]})["trace_count"] == ("-1",)
    assert traces.settings("m") == {
        **TRACE,
        "trace_rate": ("7",),
        "trace_count": ("3",),
        "log_frequency": ("4",),
    }
    assert traces.update({"trace_rate": []}, "m")["trace_rate"] == ("9",)
    assert traces.update({"trace_rate": [], "log_frequency": []}) == TRACE
    assert traces.settings("m") == {**TRACE, "trace_count": ("3",)}


def test_asking_of_models_keeps_nothing() -> None:
    traces = TraceSettings()
    for number in range(10):
        traces.update({"bogus": ["x"]}, str(number))
    assert traces.models == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trace_level": ["OFF", "OFF"]}, "Expect only one trace level 'OFF' is specified"),
        (
            {"trace_level": ["TIMESTAMPS"]},
            "Attempting to set invalid trace setting :trace file name is not given",
        ),
        ({"trace_level": ["TENSORS"], "trace_rate": ["x"]}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": ["1", "2"]}, "expect only 1 value for 'trace_rate'"),
        ({"trace_rate": [""]}, "Unable to parse 'trace_rate', got: "),
        ({"trace_rate": ["1.5"]}, "Unable to parse 'trace_rate', got: 1.5"),
        (
            {"trace_rate": ["4294967296"]},
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 4294967296",
        ),
        ({"trace_count": ["-2"]}, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        (
            {"trace_count": ["2147483648"]},
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 2147483648",
        ),
        ({"log_frequency": ["x"]}, "Unable to parse 'log_frequency', got: x"),
    ],
)
def test_wrong_trace_settings_change_nothing(changes: dict[str, list[str]], text: str) -> None:
    traces = TraceSettings()
    with pytest.raises(InvalidArgumentError) as raised:
        traces.update({"trace_count": ["5"], **changes})
    assert raised.value.message == text
    assert traces.settings() == TRACE


def test_the_trace_file_can_not_be_changed() -> None:
    with pytest.raises(UnsupportedError, match=r"^trace file location can not be updated through network"):
        TraceSettings().update({"trace_file": []})


@given(
    st.dictionaries(
        st.sampled_from([*TRACE, "bogus"]),
        st.lists(st.one_of(st.integers().map(str), st.text(max_size=5), st.just("9" * 5000)), max_size=2),
    )
)
def test_whatever_is_asked_for_is_taken_or_refused(changes: dict[str, list[str]]) -> None:
    traces = TraceSettings()
    try:
        settings = traces.update(changes)
    except ConchError:
        settings = traces.settings()
        assert settings == TRACE
    assert settings.keys() == TRACE.keys()
    assert settings["trace_level"] == ("OFF",)
    assert 0 <= int(settings["trace_rate"][0]) < 2**32
