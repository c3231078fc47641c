"""The same sequences to a real Triton and to conch: answers, controls and error texts must be the same.

Requests are sent one after the other, so that batches are the same too. Left out is what Triton 2.51 does
otherwise than later ones: ids of the wrong kind (it takes them) and ids as strings for a control (it fails).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.peers import NEEDS_TRITON, Both, Growth, compare, outcomes, serving_both, streamed
from tests.support.sequence_models import COUNTDOWN, ECHOES, IO, LONG, SUMS, python_config, write_sums
from tests.support.servers import write_model
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON

ITERATIVE = LONG + "iterative_sequence: true"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Both servers with the same models."""
    repository = tmp_path_factory.mktemp("both")
    for strategy in ("direct", "oldest"):
        write_sums(repository, strategy, strategy)
        brief = python_config(strategy, more="max_sequence_idle_microseconds: 100000", batch=1)
        write_model(repository, f"brief_{strategy}", brief, {"model.py": SUMS})
    write_sums(repository, "int32", "direct", "TYPE_INT32")
    write_sums(repository, "whole", "direct", batch=0)
    write_model(repository, "named", python_config("oldest", more=LONG), {"model.py": SUMS})
    write_model(repository, "plain", 'backend: "python" max_batch_size: 4' + IO, {"model.py": COUNTDOWN})
    decoupled = "model_transaction_policy { decoupled: true }"
    echoes = python_config("oldest", more=LONG, io=IO, extra=decoupled)
    write_model(repository, "echoes", echoes, {"model.py": ECHOES})
    write_model(
        repository, "countdown", python_config("oldest", more=ITERATIVE, io=IO), {"model.py": COUNTDOWN}
    )
    counting = python_config("oldest", more=ITERATIVE, io=IO, extra=decoupled)
    write_model(repository, "counting", counting, {"model.py": COUNTDOWN})
    with serving_both(repository) as both:
        yield both


def request(
    model: str,
    number: float,
    sequence: int | str | None = None,
    flags: str = "",
    shape: tuple[int, ...] = (1, 1),
) -> Any:
    """A request of a sequence; the flags are of `S` for start and `E` for end."""
    made = service_pb2.ModelInferRequest(model_name=model, id="r")
    made.inputs.add(name="IN", datatype="FP32", shape=shape)
    made.raw_input_contents.append(np.full(shape, number, np.float32).tobytes())
    if isinstance(sequence, str):
        made.parameters["sequence_id"].string_param = sequence
    elif sequence is not None:
        made.parameters["sequence_id"].int64_param = sequence
    for key, flag in (("sequence_start", "S"), ("sequence_end", "E")):
        if flag in flags:
            made.parameters[key].bool_param = True
    return made


STEPS: tuple[tuple[float, int, str], ...] = (
    (1, 1, "S"), (2, 2, "S"), (3, 3, "S"), (4, 3, ""), (5, 1, ""), (-1, 2, ""), (6, 2, ""),
    (7, 2, "E"), (0, 3, ""), (8, 4, "S"), (9, 4, "E"), (0, 3, ""), (1, 1, "S"), (2, 1, ""), (3, 9, ""),
    (4, 2, ""), (5, 1, "E"), (0, 3, ""), (6, 5, "SE"), (7, 3, "E"), (8, 3, ""), (9, 2**62, "SE"),
    (1, -1, "SE"),
)  # fmt: skip


@pytest.mark.parametrize("model", ["direct", "oldest", "int32"])
def test_steps(both: Both, model: str) -> None:
    for number, sequence, flags in STEPS:
        compare(both, request(model, number, sequence, flags))


def test_a_model_without_batches(both: Both) -> None:
    for number, flags in ((1, "S"), (2, ""), (3, "E"), (4, "")):
        compare(both, request("whole", number, 3, flags, (1,)))


def test_names_as_ids(both: Both) -> None:
    for number, sequence, flags in ((1, "a", "S"), (2, "b", "SE"), (3, "a", ""), (4, "a", "E"), (5, "a", "")):
        compare(both, request("named", number, sequence, flags))


@pytest.mark.parametrize("model", ["direct", "oldest"])
@pytest.mark.parametrize(
    "change",
    [
        {"sequence": None},
        {"sequence": 0, "flags": "S"},
        {"sequence": 5},
        {"sequence": 5, "flags": "E"},
        {"sequence": 5, "flags": "S", "shape": (2, 1)},
        {"sequence": 5, "flags": "S", "shape": (5, 1)},
        {"sequence": 5, "flags": "S", "shape": (1, 2)},
    ],
)
def test_refusals(both: Both, model: str, change: dict[str, Any]) -> None:
    compare(both, request(model, 1, **change))


@pytest.mark.parametrize(
    ("key", "kind", "given"),
    [
        ("sequence_id", "bool_param", True),
        ("sequence_id", "double_param", 1.5),
        ("sequence_id", "uint64_param", 5),
        ("sequence_start", "int64_param", 1),
        ("sequence_end", "string_param", "x"),
    ],
)
def test_parameters_of_a_wrong_type(both: Both, key: str, kind: str, given: Any) -> None:
    made = request("direct", 1, 5, "S")
    made.parameters[key].CopyFrom(service_pb2.InferParameter(**{kind: given}))
    compare(both, made)


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_idle_sequences_give_their_place_away(both: Both, strategy: str) -> None:
    model = f"brief_{strategy}"
    compare(both, request(model, 1, 1, "S"))
    compare(both, request(model, 2, 2, "S"))
    compare(both, request(model, 3, 1))


def test_requests_that_run_again(both: Both) -> None:
    for number in (1, 3, 2):
        compare(both, request("countdown", number))


def test_streams(both: Both) -> None:
    cases: list[list[Any]] = [
        [request("echoes", 1, 4, "S"), request("echoes", 2, 4), request("echoes", 3, 4, "E")],
        [request("echoes", 3, 4)],
        [request("counting", 4)],
        [request("oldest", number, 6, flags) for number, flags in ((1, "S"), (2, ""), (3, ""), (4, "E"))],
    ]
    for requests in cases:
        theirs, ours = streamed(both, *requests)
        assert ours == theirs, requests[0].model_name


@pytest.mark.parametrize("name", ["direct", "oldest", "named", "countdown", "echoes"])
def test_metadata_and_config(both: Both, name: str) -> None:
    compare(both, service_pb2.ModelMetadataRequest(name=name))
    compare(both, service_pb2.ModelConfigRequest(name=name))


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_statistics(both: Both, model: str) -> None:
    """Rows without a request are part of a batch's size, and no inferences."""
    growth = Growth(both, model)
    for sequence, flags in ((1, "S"), (2, "S"), (3, "S"), (3, ""), (1, ""), (3, "E"), (2, "E"), (1, "E")):
        compare(both, request(model, 1, sequence, flags))
    theirs, ours = growth()
    assert ours == theirs


def test_what_differs_in_the_statistics_of_requests_that_run_again(both: Both) -> None:
    """Triton 2.51 counts each run as an inference, and each end of a request as a failure."""
    growth = Growth(both, "countdown")
    theirs, ours = outcomes(both, request("countdown", 3))
    assert ours == theirs
    keys = ("runs", "success", "inferences", "fail")
    triton, conch = ([each.get(("countdown", key), 0) for key in keys] for each in growth())
    assert triton[:2] == [3, 3]
    assert conch == [3, 1, 1, 0]
