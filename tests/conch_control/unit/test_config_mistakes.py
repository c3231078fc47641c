"""Each mistake in a config has its own sentence, whatever else keeps the model from being served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conch.core.errors import ConchError

if TYPE_CHECKING:
    from tests.support.sites import Site

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
    """Reason for which a load of model 'm' with a config fails, as the index or the error says it."""
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


@pytest.mark.parametrize(("config", "sentence"), [*BATCH.items(), *OTHERS.items()])
def test_mistakes_of_strict_configs_without_versions(site: Site, config: str, sentence: str) -> None:
    site.model("m", versions={}, config=f'platform: "onnxruntime_onnx" {config}')
    agent = site.agent(strict_model_config=True)
    with pytest.raises(ConchError, match="failed to poll"):
        agent.load("m", {})
    assert sentence in agent.index(False)[0].reason


def test_a_config_that_its_backend_might_have_completed(site: Site) -> None:
    assert "unable to find backend library for backend 'nope'" in reason(
        site, 'backend: "nope" input { name: "IN" }', False
    )


IO = """
input { name: "data" data_type: TYPE_FP32 dims: 16 }
output { name: "prob" data_type: TYPE_FP32 dims: 16 }
"""


def step(inputs: str = 'key: "X" value: "data"', outputs: str = 'key: "X" value: "prob"') -> str:
    return (
        f'step {{ model_name: "part" model_version: -1 input_map {{ {inputs} }} output_map {{ {outputs} }} }}'
    )


def ensemble(*steps: str, more: str = "", io: str = IO) -> str:
    return f'platform: "ensemble" {io} {more} ensemble_scheduling {{ {" ".join(steps)} }}'


NO_MAPS = 'step {{ model_name: "part" {} }}'.format
FITTING = "max_batch_size: 4"
PART = f"""
backend: "echo"
{FITTING}
input {{ name: "X" data_type: TYPE_FP32 dims: 16 }}
output {{ name: "X" data_type: TYPE_FP32 dims: 16 }}
"""
STRUCTURE = {
    ensemble(): "must specify 'step' for ensemble 'm'",
    ensemble(step().replace('model_name: "part"', "")): "must specify 'model_name' in step 0 of ensemble 'm'",
    ensemble(NO_MAPS('output_map { key: "X" value: "prob" }')): (
        "must specify 'input_map' in step 0 of ensemble 'm'"
    ),
    ensemble(NO_MAPS('input_map { key: "X" value: "data" }')): (
        "must specify 'output_map' in step 0 of ensemble 'm'"
    ),
    ensemble(step(), step()): (
        "ensemble tensor 'prob' can appear in an output map only once for ensemble 'm' step 1"
    ),
    ensemble(step(), io=IO + 'input { name: "other" data_type: TYPE_FP32 dims: 16 }'): (
        "ensemble input 'other' for ensemble m' is not used"
    ),
    ensemble(step(), step(outputs='key: "X" value: "t"')): "ensemble tensor 't' is unused in ensemble 'm'",
    ensemble(step(), more="instance_group {}"): "instance group should not be specified for ensemble 'm'",
    ensemble(step(), more="optimization {}"): "optimization should not be specified for ensemble 'm'",
    ensemble(step(), more="model_warmup {}"): "model_warmup can not be specified for ensemble 'm'",
    ensemble(step(inputs='key: "Q" value: "data"'), more=FITTING): (
        "in ensemble m, ensemble tensor data is mapping to non-existing input Q in model part"
    ),
    ensemble(step(outputs='key: "Q" value: "prob"'), more=FITTING): (
        "in ensemble m, ensemble tensor prob is mapped from non-existing output Q in model part"
    ),
    ensemble(step(), more="max_batch_size: 8"): (
        "ensemble m allows maximum batch size 8, but it contains model part which only allows maximum batch "
        "size to be 4"
    ),
    ensemble(step(), more=FITTING, io=IO.replace("FP32", "INT32")): (
        "in ensemble m, ensemble tensor data: inconsistent data type: TYPE_INT32 is inferred from model m "
        "while TYPE_FP32 is inferred from model part"
    ),
    ensemble(step(), more=FITTING, io=IO.replace("16", "8")): (
        "in ensemble m, ensemble tensor data: inconsistent shape: [-1,8] is inferred from model m while "
        "[-1,16] is inferred from model part"
    ),
    f'platform: "ensemble" {IO}': "ensemble scheduling must be set for ensemble m whose platform is ensemble",
    f'platform: "ensemble" backend: "echo" {IO}': (
        "Ensemble model 'm' must have platform type 'ensemble' and empty backend type"
    ),
    f'platform: "onnxruntime_onnx" {IO} ensemble_scheduling {{ {step()} }}': (
        "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble"
    ),
    f'platform: "tensorrt_plan" backend: "onnxruntime" {IO}': (
        "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime"
    ),
    f'platform: "invalid_platform" {IO}': "unexpected platform type 'invalid_platform' for m",
    f'backend: "echo" runtime: "../other/libtriton_echo.so" {IO}': (
        "backend library name '../other/libtriton_echo.so' escapes backend directory"
    ),
    f'backend: "echo" runtime: "nope" {IO}': "unable to find backend library 'nope' for model 'm'",
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("config", "sentence"), STRUCTURE.items())
def test_mistakes_of_ensembles_and_platforms(site: Site, strict: bool, config: str, sentence: str) -> None:
    site.model("part", config=PART)
    assert sentence in reason(site, config, strict)
