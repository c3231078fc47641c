"""`conch optimize` of an ONNX model: conversions, planted faults, an interrupted run, the repository."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.onnx_graphs import MEAN, F, S, graph, node
from tests.support.optimize_models import STEPS as FAULTS
from tests.support.optimize_models import write_two_outputs
from tests.support.servers import WAIT_S

from conch import Server
from conch.cli import main
from conch_tools.optimize import STEPS, OptimizeOptions, OptimizeResult, Step, optimize
from conch_tools.optimize.judging import Limits

pytestmark = [pytest.mark.process, pytest.mark.slow]

KEEP = Step("onnx", ("onnx",), "onnx", (), "onnx:keep")


def options(**more: Any) -> OptimizeOptions:
    return OptimizeOptions(measure_s=0.05, offline=True, **more)


def fault(name: str) -> Step:
    return Step(name, ("onnx",), "onnx_slim", (), f"{FAULTS}:{name}")


def reasons(result: OptimizeResult) -> dict[str, str]:
    return {each["chain"][-1]: each["reason"] for each in result.candidates if each["status"] != "passed"}


def statuses(result: OptimizeResult) -> dict[str, str]:
    return {each["chain"][-1]: each["status"] for each in result.candidates}


def test_an_onnx_model_becomes_a_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, samples = write_two_outputs(tmp_path / "source")
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    arguments = [
        str(model),
        f"--data={samples}",
        "--measure=0.05",
        "--offline",
        "--min-top1=0.9",
        f"--labels={tmp_path}/labels.txt",
    ]
    out = tmp_path / "out"
    code = main(["optimize", *arguments, "-o", str(out), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert json.loads((out / "report.json").read_text()) == report
    found = {each["chain"][-1]: each for each in report["candidates"]}
    exact = ("onnx", "ort-optimize", "openvino")
    for name in (*exact, "onnx-fp16", "openvino-f16"):
        assert found[name]["status"] == "passed", found[name]["reason"]
    for name in ("ort-int8-dynamic", "ort-int8-static", "openvino-int8"):  # sums overflow without VNNI
        assert found[name]["status"] == "passed" or "needed" in found[name]["reason"], found[name]["reason"]
    assert found["tensorrt"]["status"] in ("passed", "refused")
    assert found["openvino"]["accuracy"]["first"]["abs"] < 1e-4
    assert found["ort-int8-dynamic"]["bytes"] < found["onnx"]["bytes"]
    assert report["recommended"] in {found[name]["id"] for name in found if found[name]["status"] == "passed"}
    page = (out / "report.html").read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert report["recommended"] in page
    assert "http:" not in page
    assert "https:" not in page

    assert main(["check", "--strict", str(out / "repository")]) == 0
    capsys.readouterr()
    with np.load(samples) as inputs, np.load(model.parent / "answers.npz") as answers:
        with Server(out / "repository", allow_grpc=False, allow_http=False, allow_metrics=False) as server:
            outputs = server.infer("two", {"x": inputs["x"][:32]})
        for name in ("first", "second"):
            np.testing.assert_allclose(outputs[name], answers[name][:32], atol=0.05)

    # A second run takes everything from the first one.
    before = {path: path.stat().st_mtime_ns for path in out.glob("candidates/*/result.json")}
    code = main(["optimize", *arguments, "-o", str(out), "--to=openvino"])
    output = capsys.readouterr()
    assert code == 0
    assert "openvino: passed (of an earlier run)" in output.err
    assert "serve it:  conch serve" in output.out
    assert {path: path.stat().st_mtime_ns for path in out.glob("candidates/*/result.json")} == before


def test_weights_of_seven_bits_do_not_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")  # OpenVINO computes as without VNNI
    model, samples = write_two_outputs(tmp_path / "source")
    steps = [
        replace(step, options={"reduce_range": True})
        for step in STEPS
        if step.name in ("ort-int8-static", "openvino-int8")
    ]
    result = optimize(
        str(model), tmp_path / "out", options(data=samples, steps=steps, limits=Limits(min_top1=0.9))
    )
    found = {each["chain"][-1]: each for each in result.candidates}
    assert found["openvino-int8"]["status"] == "passed", found["openvino-int8"]["reason"]
    # Overflows make it ten times as much.
    assert max(each["abs"] for each in found["openvino-int8"]["accuracy"].values()) < 0.1


def test_a_model_of_a_repository_brings_its_samples(tmp_path: Path) -> None:
    model, samples = write_two_outputs(tmp_path / "source")
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    first = optimize(
        str(model), tmp_path / "first", options(data=samples, steps=[KEEP], labels=tmp_path / "labels.txt")
    )
    assert first.repository is not None
    again = optimize(str(first.repository / "two"), tmp_path / "again", options(steps=[KEEP]))
    assert again.report["samples"] == {"origin": "the model's warm-up data", "rows": 32}
    assert again.repository is not None
    for file in ("labels.txt", "config.pbtxt", "1/model.onnx", "warmup/input0"):
        written = [each.repository / "two" / file for each in (first, again) if each.repository is not None]
        assert written[0].read_bytes() == written[1].read_bytes()


def test_the_recommended_model_is_tuned_with_its_samples(tmp_path: Path) -> None:
    texts = graph([node("Identity", ["T"], ["U"])], {"T": (S, ["n", 2])}, {"U": (S, ["n", 2])})
    (tmp_path / "m.onnx").write_bytes(texts)
    result = optimize(str(tmp_path / "m.onnx"), tmp_path / "out", options(steps=[KEEP], tune_s=10))
    tune = result.report["tune"]
    measured = json.loads((Path(tune["folder"]) / "tune.json").read_text())["measurements"]
    assert not [each["failed"] for each in measured if each["failed"]]
    # Without a winner the config has the batcher's default delay.
    config = (tmp_path / "out" / "repository" / "m" / "config.pbtxt").read_text()
    assert (tune["winner"] is not None) is (Path(tune["folder"]) / "config.pbtxt.diff").exists()
    assert (tune["winner"] is None) is ("dynamic_batching { }" in config and "instance_group" not in config)
    assert main(["check", "--strict", str(result.repository)]) == 0
    again = optimize(str(tmp_path / "m.onnx"), tmp_path / "out", options(steps=[KEEP], tune_s=10))
    assert again.report["tune"] == tune
    assert json.loads((Path(tune["folder"]) / "tune.json").read_text())["measurements"] == measured


@pytest.mark.parametrize(
    ("content", "shapes"),
    [
        (graph([node("Add", ["A", "A"], ["B"])], {"A": (F, [3, 4])}, {"B": (F, [3, 4])}), {}),
        (graph([node("Identity", ["T"], ["U"])], {"T": (S, ["n", 2])}, {"U": (S, ["n", 2])}), {}),
        (
            graph([node("Add", ["file"] * 2, ["a/b:0"])], {"file": (F, ["n", 2])}, {"a/b:0": (F, ["n", 2])}),
            {},
        ),
        (MEAN, {"A": [5], "MASK": [5]}),
    ],
    ids=["without-batch", "texts", "odd-names", "variable-dims"],
)
def test_unusual_models(tmp_path: Path, content: bytes, shapes: dict[str, list[int]]) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    to_openvino = next(step for step in STEPS if step.name == "openvino")
    steps = [KEEP, to_openvino]
    result = optimize(str(tmp_path / "m.onnx"), tmp_path / "out", options(steps=steps, shapes=shapes))
    assert statuses(result) == {"onnx": "passed", "openvino": "passed"}, reasons(result)
    assert main(["check", "--strict", str(result.repository)]) == 0


def test_planted_faults_stay_out(tmp_path: Path) -> None:
    model, samples = write_two_outputs(tmp_path / "source")
    names = ("swapped", "transposed", "with_nan", "imprecise", "fixed_shape", "fixed_inside", "full_only")
    steps = [fault(name) for name in (*names, "crashing")]
    result = optimize(str(model), tmp_path / "out", options(data=samples, steps=steps))
    assert result.repository is None
    assert not (tmp_path / "out" / "repository").exists()
    assert result.report["recommended"] is None
    found = reasons(result)
    assert found["swapped"].endswith("; outputs 'first' and 'second' are swapped")
    assert found["transposed"].endswith(
        "output 'first' has the original's values in another order, as by a wrong transpose"
    )
    assert found["with_nan"].startswith("output 'first' has NaN in ")
    assert found["imprecise"].startswith("output 'first' differs by up to ")
    for name in ("fixed_shape", "fixed_inside"):
        assert found[name].startswith("conch can't load it: ")
        assert "the first dimension must be -1" in found[name]
    assert found["full_only"].startswith("batches of 1 fail: ")
    assert found["crashing"] == "its process was killed by SIGABRT"
    assert statuses(result) == {name: "failed" for name in names} | {"crashing": "error"}


def test_a_metric_decides_alone(tmp_path: Path) -> None:
    model, samples = write_two_outputs(tmp_path / "source")
    (tmp_path / "metric.py").write_text(
        "def closeness(outputs, targets):\n    return 1 - float(abs(outputs['first'] - targets).mean())\n"
    )
    with np.load(model.parent / "answers.npz") as answers:
        np.save(tmp_path / "targets.npy", answers["first"])
    steps = [fault("imprecise"), fault("swapped")]
    with_metric = options(
        data=samples,
        metric=f"{tmp_path}/metric.py:closeness",
        targets=tmp_path / "targets.npy",
        max_drop=0.05,
        steps=steps,
    )
    result = optimize(str(model), tmp_path / "out", with_metric)
    assert statuses(result) == {"imprecise": "passed", "swapped": "failed"}
    assert reasons(result)["swapped"].startswith("the metric drops from 1 to ")


def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    model, samples = write_two_outputs(tmp_path / "source")
    steps = [KEEP, fault("unless_marked")]
    rows = [(each.name, each.sources, each.result, each.requires, each.function) for each in steps]
    program = (
        "import sys; from pathlib import Path\n"
        "from conch_tools.optimize import *\n"
        f"options = OptimizeOptions(data=Path({str(samples)!r}), steps=[Step(*each) for each in {rows}], "
        f"measure_s=0.05, offline=True)\n"
        f"optimize({str(model)!r}, Path({str(tmp_path / 'out')!r}), options)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        reached = model.parent / "reached"
        end = time.monotonic() + WAIT_S
        while not reached.exists() and time.monotonic() < end:
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
    assert reached.exists()
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert (status["state"], [each["status"] for each in status["candidates"]]) == ("running", ["passed"])
    assert [each.parent.name for each in (tmp_path / "out").glob("candidates/*/result.json")] == ["01-onnx"]
    (model.parent / "go").touch()
    lines: list[str] = []
    result = optimize(str(model), tmp_path / "out", options(data=samples, steps=steps), lines.append)
    assert "01-onnx: passed (of an earlier run)" in lines
    assert statuses(result) == {"onnx": "passed", "unless_marked": "passed"}
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert (status["state"], status["recommended"]) == ("done", result.report["recommended"])
    assert sorted(each.name for each in (tmp_path / "out" / "candidates").iterdir()) == [
        "01-onnx",
        "02-unless_marked",
    ]


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = write_two_outputs(tmp_path / "source", rows=8)
    out = ["-o", str(tmp_path / "out"), "--offline"]
    few = f"--data={model.parent / 'samples.npz'}"
    pickled = tmp_path / "model.pkl"
    pickled.write_bytes(b"\x80\x04N.")
    for arguments, text in (
        ([str(tmp_path / "none.onnx")], f"there is no '{tmp_path / 'none.onnx'}'"),
        ([str(pickled)], "is a Python pickle, which can run any code"),
        ([str(model), "--to=onnxx"], "--to: 'onnxx' is none of"),
        ([str(model), "--to=treelite"], "--to: no step leads from onnx to treelite"),
        ([str(model), few], "has 8 samples; at least 32 are needed"),
        ([str(model), "--labels=none.txt"], "--labels: there is no file 'none.txt'"),
        ([str(model), "--name=a/b"], "--name: 'a/b' has other characters"),
        (
            [str(model), f"--apply={tmp_path}", "--name=source"],
            f"--apply: there is '{tmp_path}/source' already",
        ),
        ([str(model), "--metric=a.py:f", "--atol=1"], "--metric decides alone"),
    ):
        assert main(["optimize", *arguments, *out]) == 2, arguments
        assert text in capsys.readouterr().err
