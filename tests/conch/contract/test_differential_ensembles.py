"""Ensembles on a real Triton and on conch: results, texts and statistics must be the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from tests.support.ensembles import (
    ENSEMBLES,
    SPY,
    ensemble_config,
    plain,
    python_config,
    request,
    tensor_config,
    write_ensembles,
)
from tests.support.peers import NEEDS_TRITON, Both, Growth, agrees, compare, outcomes, serving_both
from tests.support.servers import RawClient, eventually, write_model
from tritonclient.grpc import service_pb2

pytestmark = [*NEEDS_TRITON, pytest.mark.slow]

ONE, TWO = [[1.0, 2.0, 3.0]], [[1.0, 2.0], [3.0, 4.0]]
CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED",
         "ALREADY_EXISTS", "CANCELLED")  # fmt: skip
UNARY: dict[str, Any] = {
    "plain": request("chain", TWO),
    "all that is passed on": request(
        "chain",
        ONE,
        foo="bar",
        number=7,
        flag=True,
        timeout=5_000_000,
        sequence_id=7,
        sequence_start=True,
        sequence_end=True,
    ),
    "a sequence by name": request("chain", ONE, sequence_id="name", sequence_start=True),
    "some outputs": request("chain", ONE, ["S2", "Y"]),
    "outputs of the first step": request("chain", ONE, ["S1"], error_spy2="INTERNAL"),
    "nested": request("outer", TWO),
    "nested error": request("outer", TWO, error_spy2="NOT_FOUND"),
    "diamond": request("diamond", TWO),
    "half a diamond": request("diamond", TWO, ["Z"]),
    "a missing output": request("chain", ONE, drop_spy=True),
    "a missing output that was asked for": request("chain", ONE, ["S2"], drop_spy2=True),
    "an input of the wrong shape": request("chain", [1.0]),
    "too large a batch": request("chain", [[1.0]] * 9),
    "an unknown output": request("chain", ONE, ["Z"]),
    "an unknown input": request("chain", {"Z": ONE}),
    "with an optional input": request("optional", {"X": ONE, "O": ONE}),
    "without an optional input": request("optional", ONE),
    "without an input that a model needs": request("needed", {}),
    "unary to a decoupled one": request("each", ONE),
    "labels": request("labelled", [[1, 3, 2]], ["Y:2"]),
    "labels of a batch": request("labelled", [[1, 3, 2], [4, 6, 5]], ["Y:3"]),
    "reshaped": request("reshaped", [TWO, TWO]),
    "raises": request("chain", ONE, raise_spy2=True),
}
for _code in CODES:
    UNARY[f"error {_code}"] = request("chain", ONE, error_spy=_code)
for _name in ("one without", "one with dims", "without then with", "with then without"):
    UNARY[f"{_name}, one row"] = request(_name, ONE)
    UNARY[f"{_name}, two rows"] = request(_name, TWO)
UNARY["none over one"] = request("none over one", ONE[0])
UNARY["none over dims, one row"] = request("none over dims", ONE)
UNARY["none over dims, two rows"] = request("none over dims", TWO)

STREAMS: dict[str, Any] = {
    "each": request("each", ONE),
    "nothing": request("each", [[]]),
    "nothing, and that said": request("each", [[]], triton_enable_empty_final_response=True),
    "all outputs": request("all", ONE),
    "one output": request("all", ONE, ["Z"]),
    "some outputs missing": request("all", ONE, part=True),
    "twice": request("twice", ONE),
    "joined again": request("both", ONE),
    "joined with one missing": request("both", ONE, part=True),
    "an error first": request("each", ONE, error_many=0),
    "an error of the next step": request("each", ONE, error_spy="UNAVAILABLE"),
    "not decoupled": request("chain", ONE),
    "an error, not decoupled": request("chain", ONE, error_spy="UNAVAILABLE"),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Both servers with the same ensembles."""
    repository = tmp_path_factory.mktemp("ensembles")
    write_ensembles(repository)
    # Triton still waits for some requests that it has answered, when it is to stop.
    with serving_both(repository, "--exit-timeout-secs=2") as clients:
        yield clients


def in_order(outcome: Any) -> Any:
    """An answer with its outputs by name: Triton gives those of ensembles in no order."""
    if not isinstance(outcome, dict):
        return outcome
    contents = zip(outcome.get("outputs", []), outcome.get("raw_output_contents", []), strict=True)
    return {
        **outcome,
        "outputs": sorted((output["name"], *output.items(), data) for output, data in contents),
        "raw_output_contents": None,
    }


@pytest.mark.parametrize("name", UNARY)
def test_requests(both: Both, name: str) -> None:
    theirs, ours = (in_order(outcome) for outcome in outcomes(both, UNARY[name]))
    assert agrees(ours, theirs), f"{ours} != {theirs}"


@pytest.mark.parametrize("name", STREAMS)
def test_streams(both: Both, name: str) -> None:
    def answers(client: RawClient) -> list[Any]:
        call = client.stream([STREAMS[name]])
        found = []
        for message in call:
            # Whether the last answer knows that it is the last is a matter of time, in Triton.
            final = message.infer_response.parameters.pop("triton_final_response")
            response = in_order(MessageToDict(message.infer_response, preserving_proto_field_name=True))
            if message.infer_response.outputs or message.error_message:
                found.append((message.error_message, response))
            else:
                assert final.bool_param
        return found

    theirs, ours = (answers(client) for client in both.clients)
    assert ours == theirs


@pytest.mark.parametrize("name", ENSEMBLES)
def test_metadata_and_config(both: Both, name: str) -> None:
    compare(both, service_pb2.ModelMetadataRequest(name=name))
    compare(both, service_pb2.ModelConfigRequest(name=name))


def test_statistics(both: Both) -> None:
    """Counts after the same requests, of an ensemble and of its models; times differ."""
    growth = Growth(both, "outer", "chain", "spy", "spy2")
    for values in (ONE, TWO, TWO):
        theirs, ours = outcomes(both, request("outer", values))
        assert isinstance(ours, dict)
        assert isinstance(theirs, dict)
    outcomes(both, request("outer", [1.0]))
    theirs, ours = growth()
    assert ours == theirs


def step(model: str, sources: dict[str, str], targets: dict[str, str]) -> Any:
    return model, sources, targets


M = plain
BROKEN = {
    "no step": ensemble_config([]),
    "no name": ensemble_config([M("", "X", "Y")]),
    "no inputs": ensemble_config([step("m", {}, {"OUT": "Y"})]),
    "no outputs": ensemble_config([step("m", {"IN": "X"}, {})]),
    "made twice": ensemble_config([M("m", "X", "Y"), M("m", "X", "Y")]),
    "input not used": ensemble_config([M("m", "X", "Y")], inputs=["X", "Z"]),
    "output not made": ensemble_config([M("m", "X", "t")]),
    "not connected": ensemble_config([M("m", "t", "Y"), M("m", "X", "u")]),
    "unused": ensemble_config([M("m", "X", "Y"), M("m", "X", "t")]),
    "circle": ensemble_config([M("m", "t", "u"), M("m", "u", "t"), M("m", "X", "Y")]),
    "circle to an output": ensemble_config(
        [step("two", {"A": "X", "B": "u"}, {"OUT": "t"}), M("m", "t", "u"), M("m", "t", "Y")]
    ),
    "instance group": ensemble_config([M("m", "X", "Y")], extra="instance_group { count: 1 }"),
    "optimization": ensemble_config([M("m", "X", "Y")], extra="optimization { priority: PRIORITY_MAX }"),
    "warm-up": ensemble_config([M("m", "X", "Y")], extra='model_warmup { name: "w" }'),
    "backend": ensemble_config([M("m", "X", "Y")], extra='backend: "python"'),
    "batch size": ensemble_config([M("small", "X", "Y")]),
    "type": ensemble_config([M("m", "X", "t"), M("ints", "t", "Y")]),
    "type of an input": ensemble_config([M("ints", "X", "Y")]),
    "shape": ensemble_config([M("four", "X", "t"), M("five", "t", "Y")]),
    "shape of an input": ensemble_config([M("four", "X", "Y")], dims="5"),
    "rank": ensemble_config([M("four", "X", "Y")], dims="4, 1"),
    "no such input": ensemble_config([step("m", {"NO": "X"}, {"OUT": "Y"})]),
    "no such output": ensemble_config([step("m", {"IN": "X"}, {"NO": "Y"})]),
    "not mapped": ensemble_config([step("two", {"A": "X"}, {"OUT": "Y"})]),
    "decoupled and not": ensemble_config(
        [M("many", "X", "t"), step("two", {"A": "t", "B": "X"}, {"OUT": "Y"})]
    ),
    "decoupled output": ensemble_config([M("many", "X", "Y"), M("m", "X", "Z")], ["Y", "Z"]),
    "missing": ensemble_config([M("nothere", "X", "Y")]),
    "no version": ensemble_config([M("m", "X", "Y")]).replace("model_version: -1", "model_version: 2"),
    "version 0": ensemble_config([M("m", "X", "Y")]).replace("model_version: -1", ""),
    "itself": ensemble_config([step("itself", {"X": "X"}, {"Y": "Y"})]),
    "a model that fails": ensemble_config([M("failing", "X", "Y")]),
    "an ensemble that fails": ensemble_config([step("a model that fails", {"X": "X"}, {"Y": "Y"})]),
}  # fmt: skip
FAILING = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("no way")

    def execute(self, requests):
        pass
"""


def write_parts(repository: Path) -> None:
    """Models for ensembles that can't be loaded, and these."""
    ends = [("input", "A"), ("input", "B"), ("output", "OUT")]
    more = {
        "m": python_config(),
        "small": python_config(2),
        "ints": python_config().replace("FP32", "INT32"),
        "four": python_config(dims="4"),
        "five": python_config(dims="5"),
        "many": python_config(more="model_transaction_policy { decoupled: true }"),
        "two": 'backend: "python"\nmax_batch_size: 8\n' + "".join(tensor_config(*end) for end in ends),
    }
    for name, config in more.items():
        write_model(repository, name, config, {"model.py": SPY})
    write_model(repository, "failing", python_config(), {"model.py": FAILING})
    for name, config in BROKEN.items():
        write_model(repository, name, config)


def test_what_can_not_be_loaded(tmp_path: Path) -> None:
    write_parts(tmp_path)
    flags = ("--model-control-mode=explicit",)
    with serving_both(tmp_path, *flags) as both:
        for name in BROKEN:
            theirs, ours = outcomes(both, service_pb2.RepositoryModelLoadRequest(model_name=name))
            assert agrees(ours, theirs), name
            assert isinstance(ours, tuple), name
        # What Triton says of those that it can't even read is in its log only.
        theirs_log = (tmp_path / "triton.log").read_text()
        index = both.conch("RepositoryIndex", service_pb2.RepositoryIndexRequest()).models
        for line in index:
            if line.name in BROKEN and line.reason:
                assert line.reason.encode("unicode_escape").decode() in theirs_log, line.name


def test_unloading_and_reloading(tmp_path: Path) -> None:
    write_ensembles(tmp_path)
    flags = ("--model-control-mode=explicit",)
    load, unload = service_pb2.RepositoryModelLoadRequest, service_pb2.RepositoryModelUnloadRequest
    with serving_both(tmp_path, *flags) as both:

        def states(client: RawClient) -> Any:
            index = client("RepositoryIndex", service_pb2.RepositoryIndexRequest()).models
            return sorted((line.name, line.state, line.reason) for line in index if line.state)

        def agreed() -> bool:
            """True once both say the same and unload nothing; parts follow their ensemble later."""
            theirs, ours = (states(client) for client in both.clients)
            return ours == theirs and all(state != "UNLOADING" for _, state, _ in ours)

        with_parts = unload(model_name="outer")
        with_parts.parameters["unload_dependents"].bool_param = True
        steps = [
            load(model_name="outer"),
            unload(model_name="spy2"),
            request("outer", ONE),
            load(model_name="spy2"),
            request("outer", ONE),
            load(model_name="spy"),
            with_parts,
            load(model_name="labelled"),
            unload(model_name="labelled"),
        ]
        for message in steps:
            theirs, ours = (in_order(outcome) for outcome in outcomes(both, message))
            assert ours == theirs
            eventually(agreed, "both are in the same state")
