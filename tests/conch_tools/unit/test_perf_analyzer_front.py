"""perf_analyzer's flags, text, CSV, profile export and exit codes."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.records import RequestRecord
from conch_tools.perf.measure.results import Generator, Load, PerfResult, Point, ServerStatistics
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.perf_analyzer import perf_analyzer_command
from conch_tools.perf.perf_analyzer.flags import FlagError, Translation, translate
from conch_tools.perf.perf_analyzer.perf_analyzer_command import Measured, MeasureError
from conch_tools.perf.perf_analyzer.profile_export import Experiment
from conch_tools.perf.perf_analyzer.windows import Windows

MS = 1_000_000


def _point(concurrency: float, rate: int, *, cached: bool = False) -> Point:
    slices = []
    for second in range(5):
        times = Histogram.of(np.random.default_rng(second).normal(4 * MS, MS / 10, rate))
        slices.append(Slice(second, rate, rate, rate, latency=times, service=times))
    count = rate * 5
    stages = [count * part * MS // 10 for part in (20, 1, 2, 3, 4)]
    server = replace(ServerStatistics(count, count // 2, count), cache_hits=3 if cached else 0)
    names = ("request_ns", "queue_ns", "input_ns", "infer_ns", "output_ns")
    server = replace(server, **dict(zip(names, stages, strict=True)))
    return Point(
        Load("concurrency", concurrency),
        tuple(slices),
        5.0,
        1,
        Generator(1, 1, 5),
        server,
        composing={"part:1": server},
        metrics={"gpu_utilization:GPU-1": 0.5, "gpu_utilization:GPU-2": 0.25},
        send_ns=20_000,
        receive_ns=10_000,
    )


RESULT = PerfResult("m", "1", "grpc", "grpc", 2, 200, (), {}, "2026", points=(_point(4, 400), _point(1, 200)))


def _run(*arguments: str, result: PerfResult = RESULT, experiments: tuple[Experiment, ...] = ()) -> int:
    # Windows of one second, as the results have.
    return perf_analyzer_command.main(
        ["-m", "m", "-p", "800", *arguments], lambda _: Measured(result, experiments), "1.0"
    )


def test_csv_by_column_names(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    assert _run("--concurrency-range", "1:4:3", "-f", str(file), "--verbose-csv", "--percentile", "75") == 0
    text = file.read_text()
    assert text.splitlines()[0] == (
        "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,"
        "Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p75 latency,"
        "p90 latency,p95 latency,p99 latency,Avg latency,request/response,response wait,"
        "Avg GPU Utilization,Avg GPU Power Usage,Max GPU Memory Usage,Total GPU Memory"
    )
    first, second = csv.DictReader(text.splitlines())
    assert (first["Concurrency"], first["Inferences/Second"]) == ("1", "400")
    assert (second["Concurrency"], second["Inferences/Second"]) == ("4", "800")
    assert first["Avg GPU Utilization"] == "GPU-1:0.5;GPU-2:0.25;"
    parts = [
        "Client Send",
        "Network+Server Send/Recv",
        "Server Queue",
        *(f"Server Compute {stage}" for stage in ("Input", "Infer", "Output")),
        "Client Recv",
    ]
    assert sum(int(first[part]) for part in parts) == pytest.approx(int(first["Avg latency"]), abs=len(parts))
    assert int(first["Server Queue"]) == 100
    (composing,) = csv.DictReader((tmp_path / "part_v1.out.csv").read_text().splitlines()[:2])
    assert composing["Server Compute Output"] == "400"


def test_csv_has_cache_and_response_columns_only_where_needed(tmp_path: Path) -> None:
    point = _point(1, 100, cached=True)
    for one in point.slices:
        one.responses *= 3
    _run("-f", str(tmp_path / "out.csv"), result=replace(RESULT, points=(point,)))
    (row,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert float(row["Response Throughput"]) == 300
    assert {"Server Cache Hit", "Server Cache Miss"} <= set(row)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    _run()
    text = capsys.readouterr().out
    assert "*** Measurement Settings ***" in text
    assert (
        "Request concurrency: 4\n  Client: \n    Request count: 2000\n    Throughput: 800 infer/sec" in text
    )
    assert "(overhead 1000 usec + queue 100 usec + compute input 200 usec + compute infer 300 usec" in text
    assert "Composing models: \n    part, version: 1" in text
    assert "Concurrency: 4, throughput: 800, latency " in text


def test_profile_export(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    record = RequestRecord(10, 7, {"IN": 1, "TEXT": "a"}, (20, 30), ({"OUT": [1, 2]}, {"OUT": 3}))
    experiment = Experiment(Load("rate", 2.5), [record, replace(record, sequence_id=None)], [5, 50])
    _run("--profile-export-file", str(file), experiments=(experiment,))
    found = json.loads(file.read_text())
    assert found == {
        "experiments": [
            {
                "experiment": {"mode": "request_rate", "value": 2.5},
                "requests": [
                    {"timestamp": 10, "sequence_id": 7, **_REST},
                    {"timestamp": 10, **_REST},
                ],
                "window_boundaries": [5, 50],
            }
        ],
        "version": "1.0",
        "service_kind": "triton",
        "endpoint": "",
    }
    assert _run("--profile-export-file", str(file)) == 3


_REST = {
    "request_inputs": {"IN": 1, "TEXT": "a"},
    "response_timestamps": [20, 30],
    "response_outputs": [{"OUT": [1, 2]}, {"OUT": 3}],
}


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    unsteady = replace(_point(1, 200), slices=_point(1, 200).slices[:2], length_s=2.0)
    assert _run(result=replace(RESULT, points=(unsteady,))) == 2
    assert _run("--concurrency-range", "1:2", result=replace(RESULT, points=(unsteady, unsteady))) == 0
    silent = Point(Load("rate", 1), (Slice(0, 1, errors=Counter(UNAVAILABLE=1)),), 1.0, 1, Generator(1, 0, 1))
    assert _run(result=replace(RESULT, points=(silent,))) == 3
    err = capsys.readouterr().err
    assert "Failed to obtain stable measurement within 10 measurement windows for concurrency 1." in err

    def fails(_: Translation) -> Measured:
        raise MeasureError("no server")

    assert perf_analyzer_command.main(["-m", "m"], fails, "1.0") == 99
    assert perf_analyzer_command.main([], fails, "1.0") == 3


@pytest.mark.parametrize(
    ("flags", "translated"),
    [
        ("", "m -c 1 --duration 60 -b 1 --reuse-data -u http://localhost:8000"),
        (
            "-i grpc --concurrency-range 1:7:2 -p 1000 -b 4 -x 3",
            "m -c 1,3,5,7 --duration 20 -b 4 -x 3 --reuse-data -u grpc://localhost:8001",
        ),
        (
            "-i grpc --request-rate-range 0.5:1.5:0.5 --request-distribution poisson "
            "--ssl-grpc-use-ssl -u h:1",
            "m --rate 0.5,1,1.5 --distribution poisson --duration 60 -b 1 --reuse-data -u grpcs://h:1",
        ),
        (
            "--request-intervals f --input-data d.json --shape IN:1,2 -u https://h:1 -H A:b",
            "m --distribution trace:f --duration 60 -b 1 --shape IN:1,2 --data d.json -u https://h:1 -H A:b",
        ),
        (
            "--input-tensor-format json --output-tensor-format json",
            "m -c 1 --duration 60 -b 1 --reuse-data --tensors json -u http://localhost:8000",
        ),
        (
            "--request-rate-range 9 --num-of-sequences 3 --sequence-length 7 --sequence-length-variation 0 "
            "--sequence-id-range 5:90 --serial-sequences",
            "m --rate 9 --distribution constant --duration 60 -b 1 --sequences 3 --sequence-length 7 "
            "--sequence-length-variation 0.0 --sequence-ids 5:90 --reuse-data -u http://localhost:8000",
        ),
        (
            "--shared-memory=system --output-shared-memory-size=9 -i grpc",
            "m -c 1 --duration 60 -b 1 --reuse-data --shm system --shm-output-size 9 -u grpc://localhost:8001",
        ),
        (
            "--request-parameter n:3:int --request-parameter s:x:y:string",
            'm -c 1 --duration 60 -b 1 --reuse-data --parameter n=3 --parameter s="x:y" -u http://localhost:8000',
        ),
    ],
)
def test_translates(flags: str, translated: str) -> None:
    assert " ".join(translate(["-m", "m", *flags.split()]).arguments) == translated


def test_translates_what_model_analyzer_runs() -> None:
    line = (
        "-m simple -b 2 -u localhost:8001 -i grpc -f simple-results.csv --verbose-csv --concurrency-range 4 "
        "--stability-percentage 50 --measurement-mode count_windows --measurement-request-count 100 "
        "--collect-metrics --metrics-url http://localhost:8002/metrics --metrics-interval 500"
    )
    found = translate(line.split())
    assert (
        " ".join(found.arguments) == "simple -c 4 --duration 3600 -b 2 --reuse-data -u grpc://localhost:8001"
    )
    assert found.windows == Windows(5000, 100, 0.5)
    assert (found.csv, found.verbose_csv) == (Path("simple-results.csv"), True)
    assert (found.metrics_url, found.metrics_interval_s) == ("http://localhost:8002/metrics", 0.5)
    assert not found.without_effect


def test_translates_what_genai_perf_runs() -> None:
    line = (
        "-m llm --async --warmup-request-count 3 --stability-percentage 999 --request-count 20 -i http "
        "-u localhost:8000 --concurrency-range 2 --service-kind openai --endpoint v2/models/llm/generate "
        "--input-data inputs.json --profile-export-file absent.json"
    )
    found = translate(line.split())
    assert (
        " ".join(found.arguments)
        == "llm -c 2 --duration 3600 -b 1 --warmup 0 --endpoint v2/models/llm/generate --data inputs.json "
        "-u http://localhost:8000"
    )
    assert (found.warm_up_count, found.endpoint) == (3, "v2/models/llm/generate")
    assert found.profile_export == Path("absent.json")
    (text,) = translate(f"{line} --streaming".split()).without_effect[1:]
    assert text.startswith("--streaming: the payloads say")


def test_a_number_of_requests_has_no_windows() -> None:
    found = translate(["-m", "m", "--request-count", "7"])
    assert (found.windows, found.request_count) == (None, 7)
    assert " ".join(found.arguments).startswith("m -c 1 --duration 3600 -b 1 --warmup 0 ")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--shared-memory cuda", "--shared-memory=cuda isn't supported"),
        ("--service-kind=openai", "--endpoint PATH go together"),
        ("--service-kind=openai --endpoint v1/completions", "needs --input-data"),
        ("--service-kind=openai --endpoint v1/completions -i grpc --input-data d.json", "needs -i http"),
        ("--service-kind=tfserving", "invalid choice: 'tfserving'"),
        ("--binary-search", "--rate auto"),
        ("-l -1", "--latency-threshold is at least 0"),
        ("--bls-composing-models :1", "--bls-composing-models takes"),
        ("-r 2", "--max-trials is at least 3"),
        ("-s 0", "--stability-percentage is above 0"),
        ("--concurrency-range 4:1", "end must be at least the start"),
        ("--concurrency-range 1:2:3:4", "START:END:STEP"),
        ("--concurrency-range 1.5", "integers"),
        ("--streaming", "needs -i grpc"),
        ("--input-tensor-format json", "must be the same"),
        ("-i grpc --input-tensor-format json --output-tensor-format json", "needs -i http"),
        ("--unknown", "--unknown"),
        ("--num-of-sequences 2", "needs --request-rate-range"),
        ("--start-sequence-id 3 --sequence-id-range 3:9", "not allowed with"),
        ("--request-distribution poisson", "needs --request-rate-range"),
        ("--request-parameter n:x:int", "NAME:VALUE"),
        ("--concurrency-range 1 --request-rate-range 1", "not allowed with"),
    ],
)
def test_refuses_by_name(flags: str, reason: str) -> None:
    with pytest.raises(FlagError, match=reason):
        translate(["-m", "m", *flags.split()])


def test_names_flags_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    _run("--async", "-v")
    err = capsys.readouterr().err
    assert "no effect: -a" in err
    assert "no effect: -v" in err
