"""Python classes of PyTorch beside their weights: ``runtime: "model.py"`` with backend ``pytorch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.server_fixtures import server_fixture
from tests.support.servers import IN_PROCESS, AnyServer, client_of, serving_process, tensor
from tritonclient.utils import InferenceServerException

pytest.importorskip("torch")

import torch

SOURCE = """
import torch
from torch.nn import Linear


class Block(torch.nn.Module):
    def forward(self, x):
        return x * 2


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Linear(2, 2, bias=False)
        self.block = Block()

    def forward(self, x, y):
        return self.block(self.layer(x)), y + torch.compiler.is_compiling()
"""
CONFIG = """
backend: "pytorch"
runtime: "model.py"
max_batch_size: 4
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "B" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "P" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "Q" data_type: TYPE_INT64 dims: [ 1 ] } ]
dynamic_batching { }
parameters { key: "CONCH_TORCH_CLASS" value { string_value: "Network" } }
"""
COMPILED = """
parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: "{\\"backend\\": \\"eager\\"}" } }
"""
WEIGHTS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
ROWS = np.array([[1, 10], [2, 20]], np.float32)
EXPECTED = 2 * ROWS @ WEIGHTS.numpy().T


class Bomb:
    def __reduce__(self) -> Any:
        return (print, ("boom",))


def write(repository: Path, name: str, source: str = SOURCE, config: str = CONFIG) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (version.parent / "config.pbtxt").write_text(config)
    return version


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    torch.save({"layer.weight": WEIGHTS}, write(repository, "saved") / "model.pt")
    torch.save(
        {"layer.weight": WEIGHTS}, write(repository, "compiled", config=CONFIG + COMPILED) / "model.pt"
    )
    from safetensors.torch import save_file

    save_file({"layer.weight": WEIGHTS}, write(repository, "tensors") / "model.safetensors")
    torch.save({"layer.weight": Bomb()}, write(repository, "bomb") / "model.pt")
    write(repository, "without", source="VALUE = 1\n")
    write(repository, "fails", source=SOURCE.replace("x * 2", "x.reshape(99)"))
    return repository


server = server_fixture(flags=["--model-control-mode=explicit", IN_PROCESS.replace("python", "pytorch")])
"""Runs the classes in its own process, which is quicker to start; workers have a test of their own."""


def ask(client: Any, model: str) -> Any:
    inputs = [tensor("A", ROWS), tensor("B", np.zeros((2, 1), np.int64), "INT64")]
    return client.infer(model, inputs)


@pytest.mark.parametrize("name", ["saved", "tensors", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_class_with_weights(server: AnyServer, name: str) -> None:
    with client_of(server) as client:
        client.load_model(name)
        result = ask(client, name)
        np.testing.assert_allclose(result.as_numpy("P"), EXPECTED)
        assert (result.as_numpy("Q") == (name == "compiled")).all()
        client.unload_model(name)


@pytest.mark.process
def test_a_class_in_a_worker(tmp_path: Path) -> None:
    torch.save({"layer.weight": WEIGHTS}, write(tmp_path, "saved") / "model.pt")
    with serving_process(tmp_path) as server, client_of(server) as client:
        np.testing.assert_allclose(ask(client, "saved").as_numpy("P"), EXPECTED)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bomb", "Weights only load failed"),
        ("without", "Cannot find a subclass of torch.nn.Module named 'Network'"),
    ],
)
def test_what_can_not_be_loaded(server: AnyServer, name: str, text: str) -> None:
    with client_of(server) as client, pytest.raises(InferenceServerException, match=text):
        client.load_model(name)


def test_an_error_of_forward(server: AnyServer) -> None:
    with client_of(server) as client:
        client.load_model("fails")
        with pytest.raises(InferenceServerException, match="PyTorch execute failure: shape '\\[99\\]' is"):
            ask(client, "fails")
        client.unload_model("fails")
