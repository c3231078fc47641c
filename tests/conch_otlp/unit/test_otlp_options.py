"""Destinations of spans: flags, variables and refused values."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import pytest

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.observability.exporters import LOGS, METRICS, TRACES, DropCounter
from conch_otlp.otlp_options import OtlpOptions, otlp_options

Pairs = list[tuple[str, str]]
OPTIONS = "conch_otlp.otlp_options"


def options(pairs: Pairs, **variables: str) -> OtlpOptions:
    return otlp_options(TRACES, pairs, {f"OTEL_{name}": value for name, value in variables.items()})


@pytest.mark.parametrize(
    ("pairs", "variables", "url"),
    [
        ([], {}, "http://localhost:4318/v1/traces"),
        ([("protocol", "grpc")], {}, "http://localhost:4317"),
        ([("url", "collector:99")], {}, "http://collector:99"),
        ([("url", "https://c/x?y=1")], {}, "https://c/x?y=1"),
        ([], {"EXPORTER_OTLP_ENDPOINT": "http://c:1/base/"}, "http://c:1/base/v1/traces"),
        (
            [],
            {"EXPORTER_OTLP_ENDPOINT": "http://a", "EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/x"},
            "http://b/x",
        ),
        ([("url", "http://c")], {"EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/x"}, "http://c"),
        ([], {"EXPORTER_OTLP_ENDPOINT": "http://c:1", "EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://c:1"),
        ([], {"EXPORTER_OTLP_ENDPOINT": " "}, "http://localhost:4318/v1/traces"),
    ],
)
def test_addresses(pairs: Pairs, variables: dict[str, str], url: str) -> None:
    found = options(pairs, **variables)
    assert found.endpoint.url.geturl() == url
    assert dict(found.spans.shown)["url"] == (dict(pairs).get("url", url),)  # as it was given


@pytest.mark.parametrize(
    ("pairs", "variables", "attribute", "value"),
    [
        (
            [("encoding", "json")],
            {"EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "endpoint.protocol",
            "http/json",
        ),
        ([("header", "A=b=c"), ("header", "D=e")], {}, "endpoint.headers", (("a", "b=c"), ("d", "e"))),
        ([], {"EXPORTER_OTLP_HEADERS": "x=1%2C2, y=3"}, "endpoint.headers", (("x", "1,2"), ("y", "3"))),
        ([], {"EXPORTER_OTLP_TRACES_TIMEOUT": "250"}, "endpoint.timeout_s", 0.25),
        ([], {"EXPORTER_OTLP_COMPRESSION": "gzip"}, "endpoint.gzip", True),
        ([("compression", "none")], {"EXPORTER_OTLP_COMPRESSION": "gzip"}, "endpoint.gzip", False),
        ([], {"BSP_MAX_QUEUE_SIZE": "100"}, "limits.batch_size", 100),
        ([("bsp_schedule_delay", "0")], {"BSP_SCHEDULE_DELAY": "9"}, "limits.delay_s", 0.0),
        ([("parent", "always")], {}, "spans.follows_unsampled", True),
        ([("layout", "SemConv")], {}, "semconv", True),
        ([("ratio", "1e-3")], {}, "spans.ratio", 0.001),
    ],
)
def test_settings(pairs: Pairs, variables: dict[str, str], attribute: str, value: Any) -> None:
    assert attrgetter(attribute)(options(pairs, **variables)) == value


def test_what_describes_the_server() -> None:
    given = options(
        [("resource", "a=flag=1")],
        RESOURCE_ATTRIBUTES="service.name=list,a=list,b=x%20y",
        SERVICE_NAME="own",
    )
    wanted = {"service.name": "own", "a": "flag=1", "b": "x y"}
    assert {name: given.resource[name] for name in wanted} == wanted
    flagged = options([("resource", "service.name=flag")], SERVICE_NAME="own")
    assert flagged.resource["service.name"] == "flag"
    assert dict(flagged.spans.shown)["resource"] == ("service.name=flag",)
    assert options([]).resource["service.name"] == "conch"


@pytest.mark.parametrize(
    ("pairs", "variables", "text"),
    [
        ([("urll", "x")], {}, "did you mean 'url'?"),
        ([("url", "ftp://x")], {}, "opentelemetry,url"),
        ([("url", "http://x:0")], {}, "opentelemetry,url"),
        ([("protocol", "http")], {}, "http/protobuf, http/json, grpc"),
        ([("protocol", "grpc"), ("encoding", "json")], {}, "it contradicts protocol=grpc"),
        ([("bsp_max_queue_size", "x")], {}, 'Bad option: "--trace-config opentelemetry,bsp_max_queue_size"'),
        ([("bsp_max_queue_size", "5"), ("bsp_max_export_batch_size", "6")], {}, "not be above"),
        ([], {"BSP_MAX_QUEUE_SIZE": "-1"}, 'Bad option: "OTEL_BSP_MAX_QUEUE_SIZE"'),
        ([], {"EXPORTER_OTLP_TIMEOUT": "1s"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
        ([("certificate", "/nowhere")], {}, "the file can't be read"),
        ([("resource", "novalue")], {}, "<name>=<value>"),
        ([("layout", "x")], {}, "triton, semconv"),
        *(
            (
                [("ratio", text)],
                {},
                'opentelemetry,ratio".\nit must be a number from 0 to 1, such as 0.01, got: ',
            )
            for text in ("-0.1", "1.01", "nan", "1%", "1e9", "0.1.2", ".")
        ),
        (
            [("return-header", "yes")],
            {},
            'opentelemetry,return-header".\nit must be one of true, false, got: yes',
        ),
    ],
)
def test_what_is_refused(pairs: Pairs, variables: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        options(pairs, **variables)
    assert text in refused.value.message


def test_secrets_are_not_shown() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        options([("header", "Key=sécret")])
    assert "cret" not in refused.value.message


@pytest.mark.parametrize("signal", [TRACES, METRICS, LOGS])
def test_a_missing_package_is_named(signal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the messages are an extra: settings are read without them, exporters not opened."""
    for name in [name for name in sys.modules if name.startswith("conch_otlp.") and name != OPTIONS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.proto.")]:
        monkeypatch.setitem(sys.modules, name, None)
    read = otlp_options(signal, [("url", "http://c")], {})
    text = rf"the export of {signal} needs a package that is missing \(opentelemetry.*pip install 'conch\["
    with pytest.raises(UnavailableError, match=text):
        read.open_exporter(DropCounter())
