"""Request validation: Triton's rules and texts, batch sizes and batch keys, reshapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.requests_without_batch import BATCH_NOTE
from tests.support.core import Answers, make_spec

from conch.core.errors import InvalidArgumentError
from conch.core.padding import PaddedInput, Padding
from conch.core.request import InferenceRequest
from conch.core.spec import ControlTensor, ModelSpec, SequenceBatching, TensorSpec
from conch.core.tensor import ELEMENT_SIZES, Tensor, encode_bytes
from conch.core.validation import RequestValidator, reshaped_shape, shape_text


def tensor(name: str, shape: tuple[int, ...], datatype: str = "FP32", data: bytes | None = None) -> Tensor:
    if data is None:
        count = int(np.prod([max(dim, 0) for dim in shape]))
        data = encode_bytes([b"x"] * count) if datatype == "BYTES" else bytes(count * ELEMENT_SIZES[datatype])
    return Tensor(name, datatype, shape, data)


def request_of(*tensors: Tensor, **changes: Any) -> InferenceRequest:
    request = InferenceRequest("m", "", {one.name: one for one in tensors}, Answers(), 0)
    for attribute, setting in changes.items():
        setattr(request, attribute, setting)
    return request


def specs(*names: str, optional: tuple[str, ...] = ()) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "FP32", (4,), optional=name in optional) for name in names)


PLAIN = make_spec(inputs=(TensorSpec("X", "FP32", (16,)),))
BATCHED = make_spec(8, inputs=(TensorSpec("X", "FP32", (16,)),))
PAIR = make_spec(8, inputs=specs("A", "B"))
THREE = make_spec(inputs=specs("INPUT0", "INPUT1", "INPUT2"))
OPTIONAL = make_spec(inputs=specs("INPUT0", "INPUT1", "INPUT2", "INPUT3", optional=("INPUT3",)))
ANY = make_spec(inputs=(TensorSpec("X", "FP32", (-1, -1)),))
STRINGS = make_spec(8, inputs=(TensorSpec("X", "BYTES", (16,)),))
ANY_STRINGS = make_spec(inputs=(TensorSpec("X", "BYTES", (-1,)),))


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(
    ("datatype", "dim", "fits"),
    [
        ("FP32", 2**61 - 1, True),
        ("FP32", 2**61, False),
        ("FP32", 2**63 - 1, False),
        ("INT8", 2**63 - 1, True),
        ("INT8", 2**63, False),
        ("BYTES", 2**60 - 1, True),
        ("BYTES", 2**60, False),
    ],
)
def test_an_empty_tensor_whose_other_dimensions_no_array_can_have(
    batches: bool, datatype: str, dim: int, fits: bool
) -> None:
    dims = (-1,) if batches else (-1, -1)
    check = RequestValidator(make_spec(8 * batches, inputs=(TensorSpec("X", datatype, dims),)))
    request = request_of(Tensor("X", datatype, (0, dim), b""))
    if fits:
        check(request)
        return
    size = ELEMENT_SIZES.get(datatype, 8)
    with pytest.raises(InvalidArgumentError) as raised:
        check(request)
    assert raised.value.message == (
        f"byte size overflow for input 'X' for model 'm': the dimensions of shape [0,{dim}] other than "
        f"0 * data type size ({size}) exceed the maximum allowed size ({2**63 - 1})"
    )


def strings(count: int) -> bytes:
    return encode_bytes([b"ab"] * count)


@pytest.mark.parametrize(
    ("spec", "request_", "text"),
    [
        pytest.param(
            THREE,
            request_of(tensor("INPUT0", (4,))),
            "expected 3 inputs but got 1 inputs for model 'm'. Got input(s) ['INPUT0'], but missing "
            "required input(s) ['INPUT1','INPUT2']. Please provide all required input(s).",
            id="missing",
        ),
        pytest.param(
            OPTIONAL,
            request_of(),
            "expected number of inputs between 3 and 4 but got 0 inputs for model 'm'. Got input(s) [], "
            "but missing required input(s) ['INPUT0','INPUT1','INPUT2']. Please provide all required "
            "input(s).",
            id="missing-with-optional",
        ),
        pytest.param(
            OPTIONAL,
            request_of(*(tensor(f"INPUT{number}", (4,)) for number in (0, 1, 3))),
            "expected number of inputs between 3 and 4 but got 3 inputs for model 'm'. Got input(s) "
            "['INPUT0','INPUT1','INPUT3'], but missing required input(s) ['INPUT2']. Please provide all "
            "required input(s).",
            id="an-optional-one-is-no-substitute",
        ),
        pytest.param(
            PLAIN,
            request_of(tensor("Y", (16,))),
            "unexpected inference input 'Y' for model 'm', allowed inputs are: X",
            id="unknown",
        ),
        pytest.param(
            PLAIN,
            request_of(tensor("X", (16,)), tensor("Y", (16,))),
            "unexpected inference input 'Y' for model 'm', allowed inputs are: X",
            id="one-too-many",
        ),
        pytest.param(
            OPTIONAL,
            request_of(*(tensor(name, (4,)) for name in ("INPUT0", "INPUT1", "INPUT2", "Y"))),
            "unexpected inference input 'Y' for model 'm', allowed inputs are: INPUT0, INPUT1, INPUT2, "
            "INPUT3",
            id="unknown-in-place-of-optional",
        ),
        pytest.param(
            PLAIN,
            request_of(tensor("X", (16,)), requested=("OUT", "NONE")),
            "unexpected inference output 'NONE' for model 'm', allowed outputs are: OUT",
            id="unknown-output",
        ),
        pytest.param(
            PLAIN,
            request_of(tensor("X", (16,), "INT32")),
            "inference input 'X' data-type is 'INT32', but model 'm' expects 'FP32'",
            id="datatype",
        ),
        pytest.param(
            BATCHED,
            request_of(tensor("X", ())),
            "input 'X' has no shape but model requires batch dimension for 'm'. Expected [-1,16], got []",
            id="no-batch-dimension",
        ),
        pytest.param(
            PAIR,
            request_of(tensor("A", (1, 4)), tensor("B", (2, 4))),
            "input 'A' batch size does not match other inputs for 'm'. Expected 2, got 1",
            id="batch-sizes-differ",
        ),
        pytest.param(
            PAIR,
            request_of(tensor("A", (0, 4)), tensor("B", (2, 4))),
            "input 'A' batch size does not match other inputs for 'm'. Expected 2, got 0",
            id="batch-sizes-differ-from-zero",
        ),
        pytest.param(
            PAIR,
            request_of(tensor("A", (1, 4), "INT32"), tensor("B", (1, 4), "INT32")),
            "inference input 'B' data-type is 'INT32', but model 'm' expects 'FP32'",
            id="the-last-of-several-wrong-inputs",
        ),
        pytest.param(
            BATCHED,
            request_of(tensor("X", (9, 16))),
            "inference request batch-size must be <= 8 for 'm', got 9",
            id="batch-too-large",
        ),
        pytest.param(
            BATCHED,
            request_of(tensor("X", (1, 8))),
            f"unexpected shape for input 'X' for model 'm'. Expected [-1,16], got [1,8]. {BATCH_NOTE}",
            id="shape-with-batching",
        ),
        pytest.param(
            BATCHED,
            request_of(tensor("X", (16,))),
            f"unexpected shape for input 'X' for model 'm'. Expected [-1,16], got [16]. {BATCH_NOTE}",
            id="forgotten-batch-dimension",
        ),
        pytest.param(
            PLAIN,
            request_of(tensor("X", (8,))),
            "unexpected shape for input 'X' for model 'm'. Expected [16], got [8]. ",
            id="shape-ends-in-a-space",
        ),
        pytest.param(
            ANY,
            request_of(tensor("X", (4,))),
            "unexpected shape for input 'X' for model 'm'. Expected [-1,-1], got [4]. ",
            id="rank",
        ),
        *(
            pytest.param(
                ANY,
                request_of(tensor("X", shape, data=data)),
                f"All input dimensions should be specified for input 'X' for model 'm', got {text}",
                id=f"negative-{text}",
            )
            for shape, data, text in (
                ((-1, 4), b"", "[-1,4]"),
                ((2, -3), b"", "[2,-3]"),
                ((-1, -1), bytes(4), "[-1,-1]"),
            )
        ),
        pytest.param(
            BATCHED,
            request_of(tensor("X", (-2, 16))),
            "All input dimensions should be specified for input 'X' for model 'm', got [-2,16]",
            id="negative-batch",
        ),
        pytest.param(
            PLAIN,
            request_of(tensor("X", (16,), data=bytes(40))),
            "[request id: <id_unknown>] input byte size mismatch for input 'X' for model 'm'. Expected 64, "
            "got 40",
            id="byte-size",
        ),
        pytest.param(
            STRINGS,
            request_of(tensor("X", (1, 16), "BYTES", strings(17))),
            "unexpected number of string elements 17 for inference input 'X' for model 'm', expecting 16",
            id="too-many-strings",
        ),
        pytest.param(
            STRINGS,
            request_of(tensor("X", (1, 16), "BYTES", strings(14))),
            "expected 16 string elements for inference input 'X' for model 'm', got 14",
            id="too-few-strings",
        ),
        pytest.param(
            STRINGS,
            request_of(tensor("X", (1, 16), "BYTES", strings(16)[:-1])),
            "expected 16 string elements for inference input 'X' for model 'm', got 15",
            id="a-string-past-the-end",
        ),
        pytest.param(
            STRINGS,
            request_of(tensor("X", (1, 16), "BYTES", strings(15) + b"\1\0\0")),
            "incomplete string length indicator for inference input 'X' for model 'm', expecting 4 bytes "
            "but only 3 bytes available. Please make sure the string length indicator is in one buffer.",
            id="incomplete-length",
        ),
        pytest.param(
            PLAIN,
            request_of(tensor("X", (8,)), id="42"),
            "[request id: 42] unexpected shape for input 'X' for model 'm'. Expected [16], got [8]. ",
            id="request-id",
        ),
    ],
)
def test_texts(spec: ModelSpec, request_: InferenceRequest, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RequestValidator(spec)(request_)
    assert caught.value.message == text


@pytest.mark.parametrize(
    ("spec", "request_", "size"),
    [
        pytest.param(PLAIN, request_of(tensor("X", (16,))), 1, id="plain"),
        pytest.param(BATCHED, request_of(tensor("X", (8, 16))), 8, id="full-batch"),
        pytest.param(BATCHED, request_of(tensor("X", (0, 16))), 1, id="batch-of-none-counts-as-one"),
        pytest.param(ANY, request_of(tensor("X", (3, 5))), 1, id="variable"),
        pytest.param(ANY, request_of(tensor("X", (0, 5))), 1, id="variable-and-empty"),
        pytest.param(STRINGS, request_of(tensor("X", (2, 16), "BYTES")), 2, id="strings"),
        pytest.param(ANY_STRINGS, request_of(tensor("X", (0,), "BYTES", b"")), 1, id="no-strings"),
        pytest.param(OPTIONAL, request_of(*(tensor(f"INPUT{i}", (4,)) for i in (0, 1, 2))), 1, id="optional"),
        pytest.param(OPTIONAL, request_of(*(tensor(f"INPUT{i}", (4,)) for i in (3, 1, 0, 2))), 1, id="all"),
        pytest.param(PLAIN, request_of(tensor("X", (16,)), requested=("OUT",)), 1, id="requested"),
    ],
)
def test_what_fits_is_accepted(spec: ModelSpec, request_: InferenceRequest, size: int) -> None:
    RequestValidator(spec)(request_)
    assert request_.batch_size == size


def key_of(spec: ModelSpec, *tensors: Tensor) -> object:
    request = request_of(*tensors)
    RequestValidator(spec)(request)
    return request.batch_key


def test_requests_of_a_fixed_shape_all_share_a_key() -> None:
    assert key_of(BATCHED, tensor("X", (1, 16))) == key_of(BATCHED, tensor("X", (5, 16)))


def test_keys_tell_shapes_apart_but_neither_batch_sizes_nor_the_order_of_inputs() -> None:
    spec = make_spec(8, inputs=(TensorSpec("A", "FP32", (-1,)), TensorSpec("B", "FP32", (-1,))))
    key = key_of(spec, tensor("A", (1, 2)), tensor("B", (1, 3)))
    assert key == key_of(spec, tensor("B", (4, 3)), tensor("A", (4, 2)))
    assert key != key_of(spec, tensor("A", (1, 3)), tensor("B", (1, 2)))


def test_keys_tell_which_optional_inputs_there_are() -> None:
    spec = make_spec(8, inputs=specs("A", "B", "C", optional=("B", "C")))
    keys = {
        key_of(spec, *(tensor(name, (1, 4)) for name in names)) for names in (("A",), ("A", "B"), ("A", "C"))
    }
    assert len(keys) == 3


def test_shapes_of_ragged_inputs_do_not_matter_but_what_is_there_does() -> None:
    ragged = TensorSpec("A", "FP32", (-1,), ragged=True)
    plain = TensorSpec("B", "FP32", (-1,), optional=True)
    spec = make_spec(8, inputs=(ragged, plain))
    key = key_of(spec, tensor("A", (1, 2)))
    assert key == key_of(spec, tensor("A", (2, 3)))
    assert key != key_of(spec, tensor("A", (1, 2)), tensor("B", (1, 3)))
    assert key_of(spec, tensor("A", (1, 2)), tensor("B", (1, 3))) != key_of(
        spec, tensor("A", (1, 2)), tensor("B", (1, 4))
    )
    alone = make_spec(8, inputs=(ragged,))
    assert key_of(alone, tensor("A", (1, 2))) == key_of(alone, tensor("A", (4, 9))) is None


def test_keys_of_padded_inputs_are_their_padded_shapes() -> None:
    rule = PaddedInput("A", 0, (4, 8))
    spec = make_spec(8, inputs=(TensorSpec("A", "FP32", (-1, -1)),))
    spec = replace(spec, padding=Padding((rule,)))
    keys = [key_of(spec, tensor("A", (1, length, 3))) for length in (1, 4, 5, 8)]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert key_of(spec, tensor("A", (1, 1, 2))) != keys[0], "the other axis is not padded"
    with pytest.raises(InvalidArgumentError) as raised:
        key_of(spec, tensor("A", (1, 9, 3)))
    assert raised.value.message == (
        "input 'A' for model 'm' is too long: its dimension 1 is 9, the longest the model is padded to is 8"
    )


@pytest.mark.parametrize(
    ("shape", "target", "source", "skip", "result"),
    [
        ((16,), (4, 4), (16,), 0, (4, 4)),
        ((3, 16), (4, 4), (16,), 1, (3, 4, 4)),
        ((3, 1), (), (1,), 1, (3,)),
        ((3, 7, 5), (-1, 1, -1), (-1, -1), 1, (3, 7, 1, 5)),
        ((7, 2, 5), (-1, 2, 1, -1), (-1, 2, -1), 0, (7, 2, 1, 5)),
        ((0, 4), (2, 2), (4,), 1, (0, 2, 2)),
    ],
)
def test_reshaped_shape(
    shape: tuple[int, ...],
    target: tuple[int, ...],
    source: tuple[int, ...],
    skip: int,
    result: tuple[int, ...],
) -> None:
    assert reshaped_shape(shape, target, source, skip) == result


def test_shape_text() -> None:
    assert [shape_text(shape) for shape in ((), (3,), (-1, 16))] == ["[]", "[3]", "[-1,16]"]


@given(
    data=st.binary(max_size=64),
    shape=st.lists(st.integers(-2, 5), max_size=3).map(tuple),
    datatype=st.sampled_from(["FP32", "BYTES", "INT8", "NONSENSE"]),
    most=st.sampled_from([0, 4]),
)
def test_anything_is_either_accepted_and_readable_or_refused(
    data: bytes, shape: tuple[int, ...], datatype: str, most: int
) -> None:
    config_type = datatype if datatype != "NONSENSE" else "FP32"
    validate = RequestValidator(make_spec(most, inputs=(TensorSpec("X", config_type, (-1, -1)),)))
    request = request_of(Tensor("X", datatype, shape, data))
    try:
        validate(request)
    except InvalidArgumentError:
        return
    assert request.inputs["X"].numpy().shape == shape
    assert 1 <= request.batch_size <= max(most, 1)


@given(
    datas=st.lists(st.one_of(st.binary(max_size=40), st.just(bytes(16)), st.just(strings(4))), max_size=5),
    datatype=st.sampled_from(["FP32", "BYTES"]),
    most=st.sampled_from([0, 4]),
)
def test_a_signature_that_passed_excuses_no_wrong_bytes(datas: list[bytes], datatype: str, most: int) -> None:
    """Requests with one signature fare as they would without it."""
    spec = make_spec(most, inputs=(TensorSpec("X", datatype, (-1,)),))
    remembering = RequestValidator(spec)
    signature = object()
    shape = (2, 2) if most else (4,)

    def fare(validate: RequestValidator, data: bytes, **changes: Any) -> object:
        request = request_of(Tensor("X", datatype, shape, data), **changes)
        try:
            validate(request)
        except InvalidArgumentError as error:
            return error.message
        return request.batch_size, request.batch_key

    for data in datas:
        assert fare(remembering, data, signature=signature) == fare(RequestValidator(spec), data)


ANY_FP32 = TensorSpec("B", "FP32", (-1,))
PADDED = make_spec(8, inputs=(TensorSpec("A", "FP32", (-1,)), ANY_FP32))
REMEMBERING = {
    "two inputs": make_spec(8, inputs=(TensorSpec("A", "INT32", (-1,)), ANY_FP32)),
    "no batches": make_spec(inputs=(TensorSpec("A", "FP32", (-1, 2)), TensorSpec("B", "FP32", (-1, 2)))),
    "one may be missing": make_spec(8, inputs=(ANY_FP32, TensorSpec("A", "FP32", (2,), optional=True))),
    "ragged": make_spec(8, inputs=(TensorSpec("A", "FP32", (-1,), ragged=True), ANY_FP32)),
    "padded": replace(PADDED, padding=Padding((PaddedInput("A", 0, (1, 2)),))),
    "strings": make_spec(8, inputs=(TensorSpec("A", "BYTES", (2,)), ANY_FP32)),
}


def mostly(usual: object, *others: object) -> st.SearchStrategy[Any]:
    return st.sampled_from([*[usual] * 9 * len(others), *others])


@st.composite
def alike(draw: st.DrawFn, spec: ModelSpec) -> list[InferenceRequest]:
    """The same request twice, as another client's is another object; mostly one that passes."""
    shape = draw(st.sampled_from([(2, 2), (2, 2), (1, 4), (4, 1), (9, 2)]))
    tensors = []
    for rule in draw(st.permutations(spec.inputs)):
        if draw(mostly(False, True)):
            continue
        datatype = draw(mostly(rule.datatype, "FP32", "INT32", "INT64", "BYTES"))
        own = draw(mostly(shape, (2, 2), (1, 4), (4,), (2, 0), (-1, 2)))
        whole = tensor("", own, datatype).data
        name = draw(mostly(rule.name, "A", "C"))
        tensors.append((name, datatype, own, draw(mostly(whole, bytes(16), b""))))
    requested = draw(mostly(None, ("OUT",), ("OUT", "OUT"), ("NO",)))
    return [request_of(*(Tensor(*one) for one in tensors), requested=requested) for _ in range(2)]


@pytest.mark.parametrize("kind", REMEMBERING)
@given(data=st.data())
def test_what_passed_before_changes_nothing_for_what_comes_after(kind: str, data: st.DataObject) -> None:
    """Requests without a signature are known by what they look like; they fare as if they came first."""
    spec = replace(REMEMBERING[kind], outputs=(TensorSpec("OUT", "FP32", (-1,)),))
    remembering = RequestValidator(spec)

    def fare(validate: RequestValidator, request: InferenceRequest) -> object:
        try:
            validate(request)
        except InvalidArgumentError as error:
            return error.message
        return request.batch_size, request.batch_key

    for one, same in data.draw(st.lists(alike(spec), min_size=3, max_size=8)):
        assert fare(remembering, one) == fare(RequestValidator(spec), same)


def test_the_type_of_a_correlation_id_is_looked_at_each_time() -> None:
    spec = replace(BATCHED, sequence=SequenceBatching(controls=(ControlTensor("ID", "CORRID", "UINT64"),)))
    validate = RequestValidator(spec)
    validate(request_of(tensor("X", (1, 16)), correlation_id=3))
    with pytest.raises(InvalidArgumentError, match="data-type is 'BYTES'"):
        validate(request_of(tensor("X", (1, 16)), correlation_id="three"))


def test_names_of_outputs_said_over_and_over_are_not_kept() -> None:
    validate = RequestValidator(replace(BATCHED, outputs=(TensorSpec("OUT", "FP32", (-1,)),)))
    for count in range(1, 5):
        validate(request_of(tensor("X", (1, 16)), requested=("OUT",) * count))
    assert validate.remembered == 1
