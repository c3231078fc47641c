"""The log and trace settings of a real Triton and of conch: answers, codes and texts must be the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.peers import NEEDS_TRITON, Both, compare, outcomes, serving_both
from tests.support.servers import write_probe
from tritonclient.grpc import service_pb2 as pb

pytestmark = NEEDS_TRITON

BOOL, NUMBER, TEXT = "bool_param", "uint32_param", "string_param"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    repository = tmp_path_factory.mktemp("models")
    write_probe(repository)
    with serving_both(repository) as both:
        yield both


def log_request(**settings: Any) -> Any:
    """A LogSettings request; each setting is a pair of its member and value, or None for none."""
    message = pb.LogSettingsRequest()
    for name, value in settings.items():
        if value is None:
            message.settings[name].SetInParent()
        else:
            setattr(message.settings[name], *value)
    return message


def trace_request(model: str = "", **settings: list[str]) -> Any:
    message = pb.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        message.settings[name].value.extend(values)
    return message


LOGS: list[dict[str, Any]] = [
    {},
    {"log_file": (TEXT, "x")},
    {"log_file": (BOOL, True), "log_info": (NUMBER, 1)},
    {"log_info": (TEXT, "x")},
    {"log_warning": (NUMBER, 1)},
    {"log_error": None},
    {"log_verbose_level": (BOOL, True)},
    {"log_verbose_level": (TEXT, "1")},
    {"log_verbose_level": None},
    {"log_format": (BOOL, True)},
    {"log_format": (TEXT, "iso8601")},
    {"log_format": None},
    {"bogus": (BOOL, True)},
    {"log_info": (BOOL, False), "bogus": (NUMBER, 1)},
    {"log_warning": (BOOL, False), "log_error": (BOOL, False)},
    {"log_verbose_level": (NUMBER, 3), "log_format": (TEXT, "ISO8601")},
    {},
    {"log_info": (BOOL, True), "log_verbose_level": (NUMBER, 0), "log_format": (TEXT, "default")},
    {},
]
TRACES: list[tuple[str, dict[str, list[str]]]] = [
    ("", {}),
    ("probe", {}),
    ("nope", {}),
    ("nope", {"trace_file": ["x"]}),
    ("", {"trace_file": []}),
    ("", {"trace_mode": ["triton"]}),
    ("", {"bogus": ["x"]}),
    ("", {"trace_level": ["TIMESTAMPS"]}),
    ("", {"trace_level": ["OFF", "OFF"]}),
    ("", {"trace_level": ["x", "OFF"]}),
    ("", {"trace_level": ["x"]}),
    ("", {"trace_level": ["OFF"]}),
    ("", {"trace_level": []}),
    *(
        ("", {name: [value]})
        for name in ("trace_rate", "trace_count", "log_frequency")
        for value in (
            "",
            "x",
            "0",
            "007",
            "+1",
            "2147483647",
            "99999999999999999999",
            "-99999999999999999999",
        )
    ),
    ("", {"trace_rate": ["1", "2"]}),
    ("", {"trace_count": ["-1"]}),
    ("", {"trace_count": ["-2"]}),
    ("", {"trace_count": ["2147483648"]}),
    ("", {"trace_level": ["OFF", "x"], "trace_rate": ["x"], "trace_count": ["y"], "log_frequency": ["z"]}),
    ("", {"trace_level": ["TENSORS"], "trace_rate": ["5"], "trace_count": ["x"]}),
    ("", {"trace_level": ["TENSORS"], "trace_rate": ["5"]}),
    ("", {"trace_rate": [], "trace_count": [], "log_frequency": []}),
    ("probe", {"trace_rate": ["7"], "trace_count": ["3"]}),
    ("", {"trace_rate": ["9"], "log_frequency": ["4"]}),
    ("probe", {}),
    ("probe", {"trace_rate": []}),
    ("", {"trace_rate": [], "log_frequency": []}),
    ("probe", {"trace_count": []}),
]


def test_log_settings(both: Both) -> None:
    for settings in LOGS:
        compare(both, log_request(**settings))


def test_a_wrong_setting_keeps_the_others_from_being_changed(both: Both) -> None:
    """Triton changes those it has come to before the wrong one."""
    compare(both, log_request(log_info=(BOOL, False), log_format=(TEXT, "x")))
    theirs, ours = outcomes(both, log_request())
    assert not theirs["settings"]["log_info"].get(BOOL)
    assert ours["settings"]["log_info"][BOOL]
    compare(both, log_request(log_info=(BOOL, True)))


def test_trace_settings(both: Both) -> None:
    for model, settings in TRACES:
        compare(both, trace_request(model, **settings))


@pytest.mark.parametrize("value", ["-5", "1.5", "1x", " 1"])
def test_numbers_that_are_none(both: Both, value: str) -> None:
    """Triton reads as far as it can, and what is below 0 as something large."""
    theirs, ours = outcomes(both, trace_request(trace_rate=[value]))
    assert isinstance(theirs, dict)
    assert ours[0] == "INVALID_ARGUMENT"
    compare(both, trace_request(trace_rate=[]))
