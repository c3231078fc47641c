"""Instance groups and rate limits at load: a real Triton and conch say the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.peers import NEEDS_TRITON, Both, outcomes, serving_both
from tests.support.servers import write_probe
from tritonclient.grpc import service_pb2

pytestmark = [*NEEDS_TRITON, pytest.mark.slow]

RATED = "instance_group {{ kind: KIND_CPU rate_limiter {{ resources {{ {} }} }} }}"
MODELS = {
    "counts": "instance_group { count: 2 } instance_group { kind: KIND_MODEL name: 'x' }",
    "none": "",
    "gpu": "instance_group { kind: KIND_GPU }",
    "gpus": "instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }",
    "auto_gpu": "instance_group { gpus: [ 0 ] }",
    "cpu_gpu": "instance_group { kind: KIND_CPU gpus: [ 0 ] }",
    "model_gpu": "instance_group { kind: KIND_MODEL gpus: [ 0 ] }",
    "passive": "instance_group { kind: KIND_CPU passive: true } instance_group { kind: KIND_CPU }",
    "enough": RATED.format('name: "R" count: 2'),
    "too_much": RATED.format('name: "R" count: 3'),
    "unknown": RATED.format('name: "Q" count: 1'),
    "nothing": RATED.format('name: "Q" count: 0'),
    "other_case": RATED.format('name: "r" count: 1'),
    "shared": RATED.format('name: "G" count: 5 global: true'),
    "shared_too_much": RATED.format('name: "G" count: 6 global: true'),
    "conflict": RATED.format('name: "G" count: 1'),
}
FLAGS = (
    "--model-control-mode=explicit",
    "--rate-limit=execution_count",
    "--rate-limit-resource=R:2",
    "--rate-limit-resource=G:1",
    "--rate-limit-resource=G:5:3",
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Both servers, limiting rates, with nothing loaded."""
    repository = tmp_path_factory.mktemp("both")
    for name, extra in MODELS.items():
        write_probe(repository, name, extra)
    with serving_both(repository, *FLAGS) as both:
        yield both


@pytest.fixture(scope="module")
def loads(both: Both) -> dict[str, tuple[Any, Any]]:
    """Outcome on each server of loading each model, and of asking for its groups if that went well."""

    def load(name: str) -> tuple[Any, Any]:
        found = outcomes(both, service_pb2.RepositoryModelLoadRequest(model_name=name))
        if any(found):  # an error, or an answer with something in it
            return found
        theirs, ours = outcomes(both, service_pb2.ModelConfigRequest(name=name))
        return theirs["config"]["instance_group"], ours["config"]["instance_group"]

    return {name: load(name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_loads(loads: dict[str, tuple[Any, Any]], name: str) -> None:
    theirs, ours = loads[name]
    assert ours == theirs
