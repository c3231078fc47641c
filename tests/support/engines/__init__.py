"""The engines as their contract suite needs them; `ENGINES` lists them, `FORMATS` all files.

``CONCH_ENGINE=package.module:Class`` runs it for an engine of another project alone.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import EntryPoint

from tests.support.engines.engine import Engine
from tests.support.engines.more_formats import OpenVinoIr, Skops, TfLite
from tests.support.engines.onnx_engine import OnnxEngine
from tests.support.engines.openvino_engine import OpenVinoEngine
from tests.support.engines.torch_engines import ExportedEngine, InductorEngine, TorchScriptEngine
from tests.support.engines.tree_engines import (
    CheckpointForest,
    LightgbmForest,
    XgboostEngine,
    XgboostJsonForest,
)

ENGINES: tuple[Engine, ...] = (
    OnnxEngine(),
    OpenVinoEngine(),
    TorchScriptEngine(),
    ExportedEngine(),
    InductorEngine(),
    XgboostJsonForest(),
    LightgbmForest(),
    CheckpointForest(),
    XgboostEngine(),
)

FORMATS: tuple[Engine, ...] = (*ENGINES, OpenVinoIr(), TfLite(), Skops())

if _foreign := os.environ.get("CONCH_ENGINE"):
    ENGINES = FORMATS = (EntryPoint("engine", _foreign, "").load()(),)


def missing_packages(engine: Engine) -> list[str]:
    """Packages of an engine that are not installed."""
    return [name for name in engine.packages if importlib.util.find_spec(name) is None]
