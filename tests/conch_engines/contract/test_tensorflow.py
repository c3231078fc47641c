"""TensorFlow models in workers, with an environment that has TensorFlow; completed and checked without it."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, one_batch, tensor_specs
from tests.support.server_fixtures import server_fixture
from tests.support.servers import AnyServer, client_of, tensor
from tritonclient.utils import InferenceServerException

from conch.backends import load_backend
from conch.core.errors import ConchError
from conch_engines.tensorflow.tensorflow_backend import TensorFlowBackend

ENVIRONMENT = Path(os.environ.get("CONCH_TENSORFLOW", Path.home() / ".cache/conch-tests/tensorflow"))
WRITER = Path(__file__).parents[2] / "support" / "tensorflow_models.py"
PLACE = f"""
parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{ENVIRONMENT}" }} }}
"""
GRAPH = """
platform: "tensorflow_graphdef"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }
"""
ANY = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
SECOND = """
parameters { key: "TF_SIGNATURE_DEF" value { string_value: "second" } }
"""

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip(f"TensorFlow is not installed in {ENVIRONMENT}; run tests/setup_tensorflow.sh")
    root = tmp_path_factory.mktemp("tensorflow")
    subprocess.run([ENVIRONMENT / "bin" / "python", WRITER, root], check=True, capture_output=True)
    return root


@pytest.fixture(scope="module")
def answers(models: Path) -> dict[str, Any]:
    with np.load(models / "answers.npz") as kept:
        return dict(kept)


@pytest.fixture(scope="module")
def repository(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    for name, source, config in (
        ("affine", "affine", PLACE + "max_batch_size: 8 dynamic_batching { }"),
        ("same", "same", PLACE + SECOND),
        ("scalars", "scalars", PLACE),
        ("any", "any", PLACE + ANY),
        ("graph", "model.graphdef", PLACE + GRAPH),
    ):
        version = repository / name / "1"
        version.mkdir(parents=True)
        kind = "graphdef" if name == "graph" else "savedmodel"
        (models / source).rename(version / f"model.{kind}")
        (version.parent / "config.pbtxt").write_text(config)
    return repository


server = server_fixture(process=True)


@pytest.fixture(scope="module")
def affine(server: AnyServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SavedModel that the server serves."""
    return next(tmp_path_factory.getbasetemp().glob("repository*/affine/1/model.savedmodel"))


def test_any_split_of_rows(server: AnyServer, answers: dict[str, Any]) -> None:
    """Requests of all sizes at once, so that they share batches."""
    rows = answers["rows"]
    parts = [(0, 1), (1, 3), (3, 8), (2, 6), (7, 8)]
    with client_of(server) as client, ThreadPoolExecutor(len(parts)) as pool:

        def ask(part: tuple[int, int]) -> Any:
            return client.infer("affine", [tensor("x", rows[slice(*part)])])

        for part, result in [*zip(parts, pool.map(ask, parts), strict=True)] * 2:
            for name in ("y", "total"):
                found = result.as_numpy(name).reshape(part[1] - part[0], -1)
                expected = answers[f"affine.{name}"][slice(*part)].reshape(found.shape)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        config = client.get_model_config("affine").config
        assert config.platform == "tensorflow_savedmodel"
        assert [(each.name, list(each.dims)) for each in config.output] == [("total", [1]), ("y", [4])]


def test_strings_and_other_types(server: AnyServer) -> None:
    text = np.array([[b"a", "é".encode()]], dtype=object)
    half = np.array([[1.5, -2.0]], np.float16)
    number = np.array([[65535]], np.uint16)
    with client_of(server) as client:
        result = client.infer(
            "same",
            [
                tensor("text", text, "BYTES"),
                tensor("half", half, "FP16"),
                tensor("number", number, "UINT16"),
            ],
        )
        assert result.as_numpy("TEXT").tolist() == text.tolist()
        assert result.as_numpy("HALF").tolist() == half.tolist()
        assert result.as_numpy("NUMBER").tolist() == number.tolist()


def test_scalars(server: AnyServer) -> None:
    """Completed dims of 1 stand for them, without a batch."""
    text = np.array([b"a\0"], dtype=object)
    with client_of(server) as client:
        result = client.infer(
            "scalars", [tensor("x", np.array([3], np.float32)), tensor("text", text, "BYTES")]
        )
        assert result.as_numpy("y").tolist() == [6]
        assert result.as_numpy("TEXT").tolist() == [b"a\0a\0"]
        # Of any rank: the config tells the dims, which a scalar's are not.
        assert client.infer("any", [tensor("x", np.array([3], np.float32))]).as_numpy("y").tolist() == [6]


def test_a_graph(server: AnyServer, answers: dict[str, Any]) -> None:
    with client_of(server) as client:
        rows = answers["rows"]
        np.testing.assert_allclose(
            client.infer("graph", [tensor("IN", rows)]).as_numpy("OUT"), rows * 2 + 1, rtol=1e-6
        )
        with pytest.raises(InferenceServerException, match="unexpected shape"):
            client.infer("graph", [tensor("IN", rows[:, :3])])


def test_the_same_model_in_tf_lite(models: Path, tmp_path: Path, answers: dict[str, Any]) -> None:
    pytest.importorskip("ai_edge_litert")
    content = (models / "model.tflite").read_bytes()
    harness = Harness(tmp_path)
    version = harness.directory("m", {"1/model.tflite": content}) / "1"
    backend = load_backend("tflite")
    config = backend.complete_config({"name": "m"}, version, {})
    assert [(each["name"], each["dims"]) for each in config["output"]] == [("total", [1]), ("y", [4])]
    inputs, outputs = tensor_specs(x=("FP32", (4,))), tensor_specs(y=("FP32", (4,)))
    spec = harness.spec("m", inputs, outputs, "model.tflite", backend="tflite", batching=one_batch(8))
    try:
        model = harness.load(backend, spec)
        rows = answers["rows"]
        found = [harness.infer(model, {"x": part}) for part in (rows[:1], rows[1:6], rows[6:])]
        joined = np.concatenate([answer.array("y") for answer in found])
        np.testing.assert_allclose(joined, answers["affine.y"], rtol=1e-5, atol=1e-6)
    finally:
        harness.close()
    for wrong in (content[: len(content) // 2], b"", b"\x1c\0\0\0TFL3" + bytes(64)):
        (version / "model.tflite").write_bytes(wrong)
        with pytest.raises(ConchError, match="unable to load TF-Lite model"):
            backend.check(spec)


@pytest.mark.parametrize(
    ("files", "parameters", "text"),
    [
        ({"1/model.savedmodel/x": b""}, {}, "unable to find '.*saved_model.pb'"),
        ({"1/model.savedmodel/saved_model.pb": b"\xff\xff"}, {}, "is no SavedModel"),
        ({"1/model.savedmodel": b"ptrt"}, {}, "is a TensorRT plan"),
        ({}, {"TF_NUM_INTRA_THREADS": "-1"}, "'TF_NUM_INTRA_THREADS' must be non-negative number for Tensor"),
        ({}, {"MAX_SESSION_SHARE_COUNT": "0"}, "'MAX_SESSION_SHARE_COUNT' must be positive number"),
        ({}, {"TF_GRAPH_TAG": "other"}, "has no graph with the tag 'other'; it has: serve"),
        ({}, {"TF_SIGNATURE_DEF": "no"}, "has no signature 'no'; it has: serving_default"),
    ],
)
def test_what_can_not_be_loaded(
    affine: Path, tmp_path: Path, files: dict[str, bytes], parameters: dict[str, str], text: str
) -> None:
    harness = Harness(tmp_path)
    harness.directory("m", files)
    if not files:
        (tmp_path / "m" / "1" / "model.savedmodel").symlink_to(affine)
    inputs, outputs = tensor_specs(x=("FP32", (4,))), tensor_specs(y=("FP32", (4,)))
    spec = harness.spec(
        "m", inputs, outputs, "model.savedmodel", platform="tensorflow_savedmodel", parameters=parameters
    )
    with pytest.raises(ConchError, match=text):
        TensorFlowBackend().check(spec)
