"""Powers of configs: each setting of a backend for data is known to be harmless, or is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from conch.backends import backend_names, load_backend
from conch.core.errors import UnavailableError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.powers import beyond_data, config_powers
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.model_definition import PollError, read_definition
from conch_frames.column_rules import COLUMNS_PARAMETER

HARMFUL = {
    *("CPU_EXTENSION_PATH", "CACHE_DIR", "TORCH_COMPILE_OPTIONAL_PARAMETERS"),
    *("CONCH_ALLOW_PICKLE", "CONCH_TRUSTED_TYPES"),
}
RUNS_CODE = {"CONCH_TORCH_CLASS"}
"""Parameters of models that are Python files."""


def found(backend: str, parameter: str) -> list[str]:
    config = ModelConfig(backend=backend)
    config.parameters[parameter].string_value = "1"
    return [each.path for each in beyond_data(config, ("pytorch",))]


def data_backends() -> list[str]:
    return [name for name in sorted(backend_names()) if not found(name, "CONCH_PINNED")]


@pytest.mark.parametrize("name", data_backends())
def test_each_parameter_is_on_one_list(name: str) -> None:
    try:
        backend = load_backend(name)
    except UnavailableError as missing:
        pytest.skip(str(missing))
    for parameter in backend.parameters:
        # A prefix has a list of its own, which an unknown setting is not on.
        known = f"{parameter}unknown" if parameter.endswith(("_", ".")) else parameter
        harmful = known != parameter or parameter in HARMFUL | RUNS_CODE
        assert bool(found(name, known)) is harmful, f"say in powers.py what '{parameter}' may do"
    assert found(name, COLUMNS_PARAMETER) == []
    assert found(name, "anything_else") == ['parameters["anything_else"]']


def test_data_backends_are_those() -> None:
    wanted = {"fil", "lightgbm", "onnxruntime", "openvino", "pytorch", "sklearn", "tflite", "xgboost"}
    assert set(data_backends()) == wanted


@dataclass
class Foreign:
    """A model of others, whose repository has checked programs of PyTorch."""

    data_only: str = "and that is off"
    checked_backends: tuple[str, ...] = ("pytorch",)


def test_a_config_in_place_of_a_registrys_is_held_to_the_same(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/notes.txt").write_text("raise SystemExit")
    (tmp_path / "m/configs").mkdir()
    options = ControlOptions(repositories=(), model_config_name="fast")
    override = '{"backend": "python", "default_model_filename": "notes.txt"}'
    read_definition("m", tmp_path / "m", options, override)
    for backend in ("python", "pytorch", "tensorflow"):
        config = override.replace("python", backend)
        with pytest.raises(PollError) as refused:
            read_definition("m", tmp_path / "m", options, config, data_only=Foreign())
        assert refused.value.reason == (
            f"it brings files that can be code (backend '{backend}' of its config), and that is off"
        )
    for backend in ("onnxruntime", "pytorch"):
        (tmp_path / "m/config.pbtxt").write_text(f'backend: "{backend}"')
        read_definition("m", tmp_path / "m", options, data_only=Foreign())
    (tmp_path / "m/configs/fast.pbtxt").write_text('backend: "pytorch"')
    with pytest.raises(PollError) as refused:
        read_definition("m", tmp_path / "m", options, data_only=Foreign())
    assert "backend 'pytorch'" in refused.value.reason
    (tmp_path / "m/configs/fast.pbtxt").unlink()
    (tmp_path / "m/1/plug.so.3").write_text("")
    with pytest.raises(PollError) as refused:
        read_definition("m", tmp_path / "m", options, data_only=Foreign())
    assert refused.value.reason == "it brings code ('1/plug.so.3'), and that is off"


def test_harmless_settings_have_no_power() -> None:
    config = ModelConfig(backend="python")
    for name in ("CONCH_OV_NUM_STREAMS", "session.set_denormal_as_zero", "of_the_model", "CONCH_PLACEMENT"):
        config.parameters[name].string_value = "1"
    config.parameters["tokenizer"].string_value = "tokenizer/of..mine"
    accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
    accelerators.add(name="tensorrt").parameters["precision_mode"] = "FP16"
    assert not list(config_powers(config))
