"""Steps of OpenVINO."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conch_tools.optimize.steps.step_main import Job

FILE = "model.xml"


def convert(job: Job) -> None:
    """Converts a model that OpenVINO reads; weights keep their 32 bits."""
    _convert(job, half=False)


def convert_half(job: Job) -> None:
    """As `convert`; weights are stored with 16 bits."""
    _convert(job, half=True)


def keep(job: Job) -> None:
    """Copies a model: its config differs."""
    for path in job.source.parent.glob("model.*"):
        shutil.copyfile(path, job.folder / path.name)


def keep_bf16(job: Job) -> None:
    """As `keep`, on a processor that computes in bfloat16."""
    if "BF16" not in _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise NotImplementedError("this processor does not compute in bfloat16")
    keep(job)


def _convert(job: Job, half: bool) -> None:
    openvino = _openvino()
    model = openvino.convert_model(job.source)
    openvino.save_model(model, job.folder / FILE, compress_to_fp16=half)


def _openvino() -> Any:
    """The package without its telemetry, which would send usage data."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    return openvino
