"""Options of tracing: what flags mean, and the texts of wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conch.core.errors import InvalidArgumentError
from conch.observability.tracing.trace_options import TailRules, TraceOptions, trace_options
from conch.observability.tracing.trace_settings import TraceValues

ON = ("level=TIMESTAMPS", "triton,file=t.json")
VALUES = TraceValues(timestamps=True, file="t.json")


@pytest.mark.parametrize(
    ("configs", "old", "expected"),
    [
        ((), {}, TraceOptions()),
        (ON, {}, TraceOptions(values=VALUES)),
        (
            ("level=tensors", "level=on", "TRITON,file=a,b=c", "rate=1", "count=5", "triton,log-frequency=2"),
            {},
            TraceOptions(values=TraceValues(True, True, 1, 5, 2, "a,b=c")),
        ),
        (
            (*ON, "slow=250ms", "failed=true"),
            {},
            TraceOptions(values=VALUES, tail=TailRules(250_000_000, True)),
        ),
        (
            ("mode=OpenTelemetry", "level=min", "opentelemetry,url=http://a:1/v1?x=y", "rate=0"),
            {},
            TraceOptions(
                "opentelemetry", TraceValues(timestamps=True, rate=0), (("url", "http://a:1/v1?x=y"),)
            ),
        ),
        (
            (),
            {"trace-file": ["t.json"], "trace-level": ["TIMESTAMPS"], "trace-rate": ["3"]},
            TraceOptions(values=replace(VALUES, rate=3)),
        ),
        ((), {"trace-level": ["TENSORS", "OFF"]}, TraceOptions()),
        (("rate=7",), {"trace-rate": ["3"]}, TraceOptions(values=TraceValues(rate=7))),
        (
            ("mode=opentelemetry", "level=min", "opentelemetry,ratio=0.1"),
            {},
            TraceOptions("opentelemetry", TraceValues(timestamps=True, rate=0), (("ratio", "0.1"),)),
        ),
    ],
)
def test_what_flags_mean(configs: tuple[str, ...], old: dict[str, list[str]], expected: TraceOptions) -> None:
    options = trace_options(configs, old)
    assert replace(options, warnings=()) == expected
    assert [flag for flag in old if f"'--{flag}' has been deprecated" in " ".join(options.warnings)] == list(
        old
    )


@pytest.mark.parametrize("level", ["TIMESTAMPS", "TENSORS"])
def test_without_a_file_nothing_is_traced(level: str) -> None:
    options = trace_options(["mode=triton", f"level={level}", "rate=2"], {})
    assert replace(options, warnings=()) == TraceOptions(values=TraceValues(rate=2))
    assert options.warnings[0].startswith("nothing is traced: trace file name is not given")


@pytest.mark.parametrize(
    ("configs", "text"),
    [
        (("rate",), "--trace-config option format is '<trace mode>,<setting>=<value>'. Got rate"),
        (("rate=",), "--trace-config option format is '<trace mode>,<setting>=<value>'. Got rate="),
        ((",rate=1",), "No trace mode specified. --trace-config option format is <trace mode>,<setting>="),
        (
            ("zipkin,url=x",),
            'invalid value for trace mode option: zipkin. Available options are "triton" and',
        ),
        (("mode=zipkin",), "invalid value for trace mode option: zipkin. Available options are"),
        (("level=HIGH",), "invalid value for trace level option: HIGH"),
        (
            ("rate=x",),
            'Bad option: "--trace-config rate".\nit must be a whole number from 0 to 4294967295, got: x',
        ),
        (("count=-2",), 'Bad option: "--trace-config count".\nit must be a whole number from -1'),
        (("triton,log-frequency=a",), 'Bad option: "--trace-config triton,log-frequency".\n'),
        (("slow=5",), 'Bad option: "--trace-config slow".\nit must be a time as 250ms or 1.5s, got: 5'),
        (("failed=maybe",), 'Bad option: "--trace-config failed".\nit must be true or false, got: maybe'),
        (
            ("rat=5",),
            "--trace-config rat=5: unknown setting 'rat', known are mode, level, rate, count, slow,",
        ),
        (
            ("triton,files=x",),
            "--trace-config triton,files=x: unknown setting 'files', known are file, log-freq",
        ),
        ((*ON, "rate=0"), "sample rate must be non-zero: --trace-config rate=1"),
        (
            ("mode=opentelemetry", "rate=0", "opentelemetry,ratio=0.1"),
            'Bad option: "--trace-config opentelemetry,ratio".\nit takes the place of rate: leave one',
        ),
        (("mode=opentelemetry", "level=TENSORS"), "Tensor level tracing is not supported by the mode"),
    ],
)
def test_wrong_flags(configs: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        trace_options(configs, {})
    assert caught.value.message.startswith(text)
