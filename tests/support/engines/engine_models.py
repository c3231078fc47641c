"""Models of an engine, written for a harness."""

from __future__ import annotations

from pathlib import Path

from tests.support.backend_harness import Harness
from tests.support.engines.engine import WIDTH, Engine

from conch.core.spec import ModelSpec, TensorSpec


def spec_of(engine: Engine, harness: Harness, name: str = "m", **changes: object) -> ModelSpec:
    outputs = tuple(TensorSpec(output, "FP32", dims) for output, dims in engine.outputs.items())
    return harness.spec(
        name,
        (TensorSpec(engine.input, "FP32", (WIDTH,)),),
        outputs,
        engine.file,
        backend=engine.backend,
        platform=engine.platform,
        config=engine.parsed_config(name),
        parameters=dict(engine.parameters),
        **changes,
    )


def version_of(engine: Engine, harness: Harness, name: str = "m", level: float = 0.0) -> Path:
    version = harness.directory(name, {}) / "1"
    engine.write(version, level)
    return version
