"""`conch optimize` of models of trees, of scikit-learn and of PyTorch.

A step whose environment has to be built has it built by conch, if the folder `ENVIRONMENTS` exists: it may
take gigabytes and minutes. Later runs find it there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import tree_models
from tests.support.optimize_models import OFFLINE, keep_environments, write_torch_module

from conch import Server
from conch.cli import main
from conch_tools.optimize import STEPS, OptimizeOptions, OptimizeResult, optimize

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps environments for later runs of the tests."""
    keep_environments(monkeypatch)


def optimized(source: Path | str, folder: Path, **more: Any) -> dict[str, Mapping[str, Any]]:
    """Candidates by their last step; all that could be made have passed, and the repository is in order."""
    options = {"measure_s": 0.05, "offline": OFFLINE, **more}
    result = optimize(str(source), folder, OptimizeOptions(**options))
    check(result)
    return {each["chain"][-1]: each for each in result.candidates}


def check(result: OptimizeResult) -> None:
    # Processors without VNNI add 8-bit products in 16 bits, which may overflow.
    strict = [each for each in result.candidates if each["class"] != "quantised"]
    assert {each["status"] for each in strict} <= {"passed", "refused", "error"}, strict
    assert all(not each["id"] for each in result.candidates if each["status"] == "error"), result.candidates
    assert main(["check", "--strict", str(result.repository)]) == 0


def passed_or_skipped(candidate: Mapping[str, Any]) -> None:
    """Skips a test of a step whose environment can't be built here."""
    if candidate["status"] != "passed" and not candidate["id"]:
        pytest.skip(candidate["reason"])
    assert candidate["status"] == "passed", candidate["reason"]


@pytest.mark.parametrize(
    ("library", "file", "kind"),
    [
        ("xgboost", "m.json", "multi"),
        ("xgboost", "m.ubj", "binary"),
        ("xgboost", "m.ubj", "regression"),
        ("lightgbm", "m.txt", "multi"),
        ("lightgbm", "m.txt", "binary"),
    ],
)
def test_boosters(tmp_path: Path, library: str, file: str, kind: str) -> None:
    make = {"xgboost": tree_models.xgboost_model, "lightgbm": tree_models.lightgbm_model}[library]
    booster = make(kind, tmp_path / file)
    found = optimized(tmp_path / file, tmp_path / "out")
    treelite = found[f"{library}-treelite"]
    assert treelite["status"] == "passed"
    assert max(each["abs"] for each in treelite["accuracy"].values()) < 1e-5
    # What is recommended answers as the library does.
    rows = np.nan_to_num(tree_models.samples()[:32])
    with Server(
        tmp_path / "out/repository", allow_grpc=False, allow_http=False, allow_metrics=False
    ) as server:
        best = next(each for each in found.values() if each["id"].startswith(_best(tmp_path / "out")))
        given = best["inputs"][0]
        dtype = {"FP32": np.float32, "FP64": np.float64}[given["datatype"]]
        outputs = server.infer("m", {given["name"]: rows.astype(dtype)})
    scores = outputs[best["outputs"][-1]["name"]]
    wanted = np.asarray(booster.predict(rows) if library == "lightgbm" else booster.inplace_predict(rows))
    ours = scores[:, 1] if kind == "binary" else scores.reshape(wanted.shape)
    np.testing.assert_allclose(ours, wanted, atol=1e-4)
    passed_or_skipped(found[f"{library}-onnx"])


def _best(folder: Path) -> str:
    return str(json.loads((folder / "report.json").read_text())["recommended"])


def test_a_forest(tmp_path: Path) -> None:
    tree_models.sklearn_model("RandomForestClassifier", "multi", tmp_path / "forest.skops")
    found = optimized(tmp_path / "forest.skops", tmp_path / "out")
    assert found["sklearn"]["accuracy"]["predict"]["equal"] == 1
    assert found["sklearn-treelite"]["status"] == "passed"
    passed_or_skipped(found["sklearn-onnx"])
    assert found["sklearn-onnx"]["accuracy"]["predict_proba"]["abs"] < 1e-5


def test_a_pipeline_with_texts_for_classes(tmp_path: Path) -> None:
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = np.nan_to_num(tree_models.samples())
    words = np.array(["low", "middle", "high"])[tree_models.labels("multi")]
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, words)
    skops.io.dump(model, tmp_path / "pipe.skops")
    found = optimized(tmp_path / "pipe.skops", tmp_path / "out")
    assert found["sklearn-treelite"]["reason"] == (
        "treelite reads forests and gradient boosting, no Pipeline"
    )
    passed_or_skipped(found["sklearn-onnx"])
    assert found["sklearn-onnx"]["accuracy"]["predict"]["equal"] == 1


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A file with functions that return a module of two inputs and two outputs."""
    function, _ = write_torch_module(tmp_path)
    return Path(function.removesuffix(":make"))


@pytest.fixture
def rows(net: Path) -> Path:
    """Samples by the names of the module's arguments."""
    return net.with_name("rows.npz")


def test_a_module(tmp_path: Path, net: Path, rows: Path) -> None:
    found = optimized(f"{net}:make", tmp_path / "out", data=rows, offline=True)
    for name in ("torch-onnx-trace", "torch-script", "torch-export", "ort-optimize", "openvino"):
        assert found[name]["status"] == "passed", found[name]["reason"]
    assert found["export-openvino"]["accuracy"]["OUTPUT__1"]["abs"] < 1e-4
    if shutil.which("g++") is not None:
        assert found["aot-inductor"]["status"] == "passed", found["aot-inductor"]["reason"]
    assert found["ort-int8-dynamic"]["class"] == "quantised"


def test_a_module_by_the_newer_exporter(tmp_path: Path, net: Path, rows: Path) -> None:
    steps = [step for step in STEPS if step.name == "torch-onnx-dynamo"]
    options = OptimizeOptions(data=rows, offline=True, measure_s=0.05, steps=steps)
    (candidate,) = optimize(f"{net}:make", tmp_path / "out", options).candidates
    passed_or_skipped(candidate)


@pytest.mark.parametrize("form", ["net.pt", "net.pt2"])
def test_files_of_pytorch(tmp_path: Path, net: Path, rows: Path, form: str) -> None:
    result = optimize(
        f"{net}:make",
        tmp_path / "first",
        OptimizeOptions(data=rows, offline=True, measure_s=0.05, to=["torchscript", "exported_program"]),
    )
    made = {"net.pt": "01-torch-script/1/model.pt", "net.pt2": "02-torch-export/1/model.pt2"}
    (made_here,) = result.folder.glob(f"candidates/{made[form]}")
    source = Path(shutil.copyfile(made_here, tmp_path / form))
    numbered = tmp_path / "numbered.npz"
    with np.load(rows) as arrays:
        np.savez(numbered, INPUT__0=arrays["x"], INPUT__1=arrays["scale"])
    found = optimized(
        source,
        tmp_path / "out",
        data=numbered,
        offline=True,
        to=["openvino", "torchscript", "exported_program"],
    )
    kind = {"net.pt": "torchscript", "net.pt2": "exported_program"}[form]
    assert found[kind]["status"] == "passed"
    step = {"net.pt": "script-openvino", "net.pt2": "export-openvino"}[form]
    assert found[step]["status"] == "passed", found[step]["reason"]


def test_inputs_of_a_module_alone(tmp_path: Path, net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["optimize", f"{net}:alone", "-o", str(tmp_path / "out"), "--offline"]
    assert main(command) == 1
    assert (
        "'alone' returns a module alone, so its inputs are not known: give --data" in capsys.readouterr().err
    )
    assert main(["optimize", str(net), "-o", str(tmp_path / "out")]) == 2
    assert "write 'net.py:FUNCTION', which returns a module" in capsys.readouterr().err
