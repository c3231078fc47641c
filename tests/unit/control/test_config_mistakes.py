"""Each mistake in a config is told in its own sentence, whatever else keeps the model from being served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conch.core.errors import ConchError

if TYPE_CHECKING:
    from tests.unit.control.conftest import Site

TENSORS = """
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 16 }
output { name: "OUT" data_type: TYPE_FP32 dims: 16 }
"""
KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)
SCATTER = "BATCH_SCATTER_WITH_INPUT_SHAPE"


def batch_input(kind: str, sources: str, more: str = "data_type: TYPE_FP32") -> str:
    return f'{TENSORS} batch_input {{ kind: {kind} target_name: "B" {sources} {more} }}'


def batch_output(sources: str, targets: str = 'target_name: "OUT"') -> str:
    return f"{TENSORS} batch_output {{ kind: {SCATTER} {targets} {sources} }}"


ONE, TWO, NO = 'source_input: "IN"', 'source_input: "IN" source_input: "IN"', ""
BATCH = {
    **{
        batch_input(kind, sources): f"batch input kind '{kind}' expects 1 source input, got {count}"
        for kind in KINDS
        for sources, count in ((NO, 0), (TWO, 2))
    },
    batch_input(KINDS[0], 'source_input: "UNKNOWN_INPUT"'): "unknown source input name 'UNKNOWN_INPUT'",
    batch_input(KINDS[0], ONE, "data_type: TYPE_INT64"): (
        "batch input data type must be TYPE_INT32 or TYPE_FP32"
    ),
    batch_input("9", ONE): "unknown batch input kind '9'",
    batch_output(NO): f"batch output kind '{SCATTER}' expects 1 source input, got 0",
    batch_output(TWO): f"batch output kind '{SCATTER}' expects 1 source input, got 2",
    batch_output('source_input: "UNKNOWN_INPUT"'): "unknown source input name 'UNKNOWN_INPUT'",
    batch_output(ONE, 'target_name: "UNKNOWN_OUTPUT"'): "unknown target output name 'UNKNOWN_OUTPUT'",
    batch_output(ONE, 'target_name: "OUT" target_name: "OUT"'): (
        "target output name 'OUT' can only be specified once"
    ),
}
OTHERS = {
    f"{TENSORS} instance_group {{ kind: KIND_CPU gpus: 0 }}": (
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs"
    ),
    f"{TENSORS} instance_group {{ kind: KIND_MODEL gpus: 0 }}": (
        "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs"
    ),
    f"{TENSORS} instance_group {{ kind: KIND_GPU }}": (
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"
    ),
    'input { name: "IN" dims: 16 } output { name: "OUT" data_type: TYPE_FP32 dims: 16 }': (
        "model input 'IN' must specify 'data_type' for m"
    ),
    'input { name: "IN" data_type: TYPE_FP32 } output { name: "OUT" data_type: TYPE_FP32 dims: 16 }': (
        "model input 'IN' must specify 'dims' for m"
    ),
}


def reason(site: Site, config: str, strict: bool) -> str:
    """Why a load of model 'm' with a config fails, as the index or the error says it."""
    site.model("m", config=config)
    agent = site.agent(strict_model_config=strict)
    with pytest.raises(ConchError) as raised:
        agent.load("m", {})
    return "; ".join([raised.value.message, *(line.reason for line in agent.index(False))])


@pytest.mark.parametrize(
    "platform", ['platform: "tensorrt_plan"', 'platform: "onnxruntime_onnx"', 'backend: "echo"']
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("config", "sentence"), [*BATCH.items(), *OTHERS.items()])
def test_mistakes_before_backends(
    site: Site, platform: str, strict: bool, config: str, sentence: str
) -> None:
    assert sentence in reason(site, f"{platform} {config}", strict)
