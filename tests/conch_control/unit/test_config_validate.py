from __future__ import annotations

import pytest

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch_control.config.parse import parse_config
from conch_control.config.problems import raise_first
from conch_control.config.validate import check_supported, config_problems, tensor_problems

RULE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }",
            "dynamic batching preferred size must be positive for m",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 4, 5 ] }",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            "dynamic_batching { priority_levels: 2 }",
            "default priority level must be in range [1, 2] for m",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1"
            " priority_queue_policy { key: 3 value {} } }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            "response_cache { enable: true } sequence_batching {}",
            "Response Cache does not currently support model m with sequence batching scheduler. Please "
            "disable the response cache.",
        ),
        (
            "response_cache { enable: true } model_transaction_policy { decoupled: true }",
            "Response Cache does not currently support model m with 'decoupled' transaction policy. Please "
            "disable the response cache.",
        ),
        (
            "response_cache { enable: true } dynamic_batching { preserve_ordering: true }",
            "response_cache of model 'm' can't be enabled with preserve_ordering of its dynamic_batching: "
            "answers from the cache do not wait for those before them; disable one of them",
        ),
        ("model_metrics { metric_control {} }", "metric control must specify 'metric_identifier'"),
        (
            "model_metrics { metric_control { metric_identifier {} } }",
            "metric identifier must specify non-empty 'family'",
        ),
        (
            'model_metrics { metric_control { metric_identifier { family: "f" } } }',
            "metric control must specify 'histogram_options'",
        ),
        *(
            (
                f'model_metrics {{ metric_control {{ metric_identifier {{ family: "f" }} {options} }} }}',
                "histogram options must specify non-empty 'buckets'",
            )
            for options in ("histogram_options {}", "histogram_options { buckets: [] }")
        ),
        (
            "ensemble_scheduling {}",
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
    ],
)
def test_rules(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        raise_first(config_problems(parse_config(f'name: "m" backend: "b" {text}', "c")))
    assert raised.value.message == message


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ("", "model {} must specify 'name'"),
        ('name: "x"', "model {} 'x' must specify 'data_type'"),
        ('name: "x" data_type: 77', "model {} 'x' must specify 'data_type'"),
        ('name: "x" data_type: TYPE_FP32', "model {} 'x' must specify 'dims'"),
        ('name: "x" data_type: TYPE_FP32 dims: 0', f"model {{}} 'x' dimension {RULE}"),
        ('name: "x" data_type: TYPE_FP32 dims: -2', f"model {{}} 'x' dimension {RULE}"),
        (
            'name: "x" data_type: TYPE_FP32 dims: 1 reshape { shape: 0 }',
            f"model {{}} 'x' reshape dimensions {RULE}",
        ),
        (
            'name: "x" data_type: TYPE_FP32 dims: 1 reshape {}',
            "model {} 'x' cannot have empty reshape for non-batching model as scalar tensors are not "
            "supported",
        ),
        (
            'name: "x" data_type: TYPE_FP32 dims: [ 2, 3 ] reshape { shape: 5 }',
            "model {} 'x' has different size for dims and reshape",
        ),
        (
            'name: "x" data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: 5 }',
            "model {} 'x' has different size for dims and reshape",
        ),
        (
            'name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ -1, 3 ] }',
            "model {} 'x' has different size for dims and reshape",
        ),
        (
            'name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] reshape { shape: -1 }',
            "model {} 'x' has different number of variable-size dimensions for dims and reshape",
        ),
    ],
)
def test_tensors(kind: str, tensor: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        raise_first(tensor_problems(parse_config(f'name: "m" {kind} {{ {tensor} }}', "c")))
    assert raised.value.message == f"{problem.format(kind)} for m"


def test_image_formats_have_three_dimensions() -> None:
    text = 'name: "m" input { name: "x" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [ 1, 2 ] }'
    with pytest.raises(InvalidArgumentError, match=r"^model input NHWC/NCHW require 3 dims for m$"):
        raise_first(tensor_problems(parse_config(text, "c")))


def test_a_name_twice() -> None:
    tensor = 'input { name: "x" data_type: TYPE_FP32 dims: 1 }'
    with pytest.raises(InvalidArgumentError, match=r"^model input 'x' is specified more than once for m$"):
        raise_first(tensor_problems(parse_config(f'name: "m" {tensor} {tensor}', "c")))


@pytest.mark.parametrize(
    "tensor",
    [
        "dims: [ 2, 4, -1, 6 ] reshape { shape: [ 8, -1, 1, 6 ] }",
        "dims: [ 1 ] reshape {}",
        "dims: [ 2, 3 ] reshape { shape: [ 3, 2 ] }",
        "dims: [ -1 ]",
    ],
)
def test_legal_tensors(tensor: str) -> None:
    text = f'max_batch_size: 1 input {{ name: "x" data_type: TYPE_FP32 {tensor} }}'
    raise_first(tensor_problems(parse_config(text, "c")))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            'ensemble_scheduling { step { model_namespace: "n" } }',
            "'ensemble_scheduling.step.model_namespace'",
        ),
        ('output { name: "x" is_shape_tensor: true }', "'output[x].is_shape_tensor'"),
        ('input { name: "x" is_non_linear_format_io: true }', "'input[x].is_non_linear_format_io'"),
        ("dynamic_batching { priority_levels: 1001 }", "'dynamic_batching.priority_levels > 1000'"),
        (
            "max_batch_size: 100001 sequence_batching {}",
            "'sequence_batching.direct with max_batch_size > 100000'",
        ),
        (
            'instance_group { kind: KIND_GPU } cc_model_filenames { key: "8.0" value: "a" }',
            "'cc_model_filenames'",
        ),
    ],
)
def test_what_is_not_built_yet_is_refused(text: str, fields: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        check_supported(parse_config(f'name: "m" {text}', "c"))
    assert raised.value.message == f"model 'm' uses {fields}: not supported yet"


def test_hints_are_accepted() -> None:
    check_supported(
        parse_config(
            """
            optimization { graph { level: 1 } priority: PRIORITY_MAX eager_batching: true }
            metric_tags { key: "a" value: "b" }
            instance_group { host_policy: "p" rate_limiter { priority: 2 } profile: "0" passive: true }
            dynamic_batching {
              preserve_ordering: true priority_levels: 1 default_priority_level: 1
              default_queue_policy { allow_timeout_override: true }
            }
            response_cache { enable: true } model_warmup { name: "w" }
            max_batch_size: 1000000
            """,
            "c",
        )
    )
