"""The config of a bound function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import conch
from conch.core.errors import InvalidArgumentError

X = conch.Tensor("X", np.float32, (-1,))
Y = conch.Tensor("Y", np.float32, (2, 3))


def message(config: conch.ModelConfig | None = None, inputs: Any = (X,), outputs: Any = (Y,)) -> Any:
    return (config or conch.ModelConfig()).message("m", inputs, outputs, 1, 1)


def test_what_is_not_said_has_the_usual_values() -> None:
    config = message()
    assert config.backend == "bound"
    assert config.max_batch_size == 4
    assert config.HasField("dynamic_batching")
    assert [list(tensor.dims) for tensor in (*config.input, *config.output)] == [[-1], [2, 3]]
    assert not config.model_transaction_policy.decoupled


def test_everything_said_is_in_the_config() -> None:
    batcher = conch.DynamicBatcher(
        max_queue_delay_microseconds=100,
        preferred_batch_size=[4, 8],
        preserve_ordering=True,
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=conch.QueuePolicy("DELAY", 5, True, 6),
        priority_queue_policy={2: conch.QueuePolicy(max_queue_size=3)},
    )
    config = message(
        conch.ModelConfig(
            max_batch_size=8,
            batcher=batcher,
            decoupled=True,
            response_cache=True,
            parameters={"a": "b"},
            text="model_warmup { name: 'w' }",
        )
    )
    batching = config.dynamic_batching
    assert list(batching.preferred_batch_size) == [4, 8]
    assert (batching.max_queue_delay_microseconds, batching.preserve_ordering) == (100, True)
    assert (batching.priority_levels, batching.default_priority_level) == (2, 1)
    policy = batching.default_queue_policy
    assert (policy.timeout_action, policy.default_timeout_microseconds) == (policy.DELAY, 5)
    assert (policy.allow_timeout_override, policy.max_queue_size) == (True, 6)
    assert batching.priority_queue_policy[2].max_queue_size == 3
    assert config.model_transaction_policy.decoupled
    assert config.response_cache.enable
    assert config.parameters["a"].string_value == "b"
    assert config.model_warmup[0].name == "w"


def test_without_batching_there_is_no_batch_dimension() -> None:
    config = message(conch.ModelConfig(batching=False))
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")


def test_text_may_choose_another_kind_of_batching() -> None:
    config = message(conch.ModelConfig(text="sequence_batching { }"))
    assert config.WhichOneof("scheduling_choice") == "sequence_batching"


def test_tensors_without_names_are_numbered() -> None:
    config = message(None, [conch.Tensor(), X, conch.Tensor()], [conch.Tensor(), conch.Tensor()])
    assert [tensor.name for tensor in config.input] == ["INPUT_1", "X", "INPUT_3"]
    assert [tensor.name for tensor in config.output] == ["OUTPUT_1", "OUTPUT_2"]


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [
        (np.float32, "FP32"),
        (np.float64, "FP64"),
        ("<f2", "FP16"),
        (">i4", "INT32"),
        (bool, "BOOL"),
        (np.uint8, "UINT8"),
        (bytes, "BYTES"),
        (str, "BYTES"),
        (object, "BYTES"),
        (np.bytes_, "BYTES"),
    ],
)
def test_dtypes(dtype: Any, datatype: str) -> None:
    assert conch.Tensor("X", dtype).datatype == datatype


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ([], [Y], "inputs: there must be at least one"),
        ([X], [], "outputs: there must be at least one"),
        ([X, X], [Y], "inputs: there are two named 'X'"),
        ([conch.Tensor("INPUT_2"), conch.Tensor()], [Y], "two named 'INPUT_2'"),
        ([np.float32], [Y], "must be a list of conch.Tensor, not of type"),
        ([conch.Tensor("X", np.complex64)], [Y], "tensor 'X' dtype complex64 has no datatype"),
        ([conch.Tensor("X", "nonsense")], [Y], "tensor 'X' dtype 'nonsense' is none of numpy's"),
        ([conch.Tensor("X", shape=(0,))], [Y], r"tensor 'X' shape \(0,\) may have positive dims and -1"),
        ([conch.Tensor("X", shape=())], [Y], r"tensor 'X' shape \(\) must have a dim; \(1,\) is that of"),
        ([conch.Tensor("X", shape="ab")], [Y], "tensor 'X' shape 'ab' must be a sequence"),  # type: ignore[arg-type]
        ([conch.Tensor("")], [Y], "inputs: '' can't be the name"),
        ([X], [conch.Tensor("Y", optional=True)], "output 'Y' can't be optional"),
    ],
)
def test_what_can_not_be_is_named(inputs: Any, outputs: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        message(None, inputs, outputs)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (conch.ModelConfig(max_batch_size=0), "max_batch_size: must be at least 1, not 0"),
        (conch.ModelConfig(text="backend: 'python'"), "'backend' follows from what was bound"),
        (conch.ModelConfig(text="nonsense: 1"), "text of the config of model 'm'"),
        (conch.ModelConfig(batcher=conch.DynamicBatcher(-1)), "config of model 'm'"),
        (
            conch.ModelConfig(batcher=conch.DynamicBatcher(default_queue_policy=conch.QueuePolicy("NO"))),  # type: ignore[arg-type]
            "timeout_action: must be one of REJECT, DELAY, not 'NO'",
        ),
        (conch.ModelConfig(parameters={"a": 1}), "config of model 'm'"),  # type: ignore[dict-item]
    ],
)
def test_settings_that_can_not_be_are_named(config: conch.ModelConfig, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        message(config)
