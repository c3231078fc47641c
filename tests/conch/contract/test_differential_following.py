"""Mode poll beside a real Triton in that mode: the same changes come to the same ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.conch.contract.test_following import CONFIG, write
from tests.support.cases import outcome
from tests.support.peers import NEEDS_TRITON, Both, compare, serving_both
from tests.support.servers import RawClient, eventually
from tritonclient.grpc import service_pb2

pytestmark = [*NEEDS_TRITON, pytest.mark.slow]


def index(client: RawClient) -> list[tuple[str, str, str, str]]:
    found = client("RepositoryIndex", service_pb2.RepositoryIndexRequest())
    # Conch keeps the error of a newer load beside the version that serves on.
    return sorted(
        (model.name, model.version, model.state, "" if model.state == "READY" else model.reason)
        for model in found.models
    )


def both_come_to(both: Both, *expected: tuple[str, str, str, str]) -> None:
    for name, client in (("Triton", both.triton), ("conch", both.conch)):
        eventually(
            lambda client=client: index(client) == list(expected),  # type: ignore[misc]
            f"{name} comes to {expected}, not {index(client)}",
        )


def test_changes_come_to_the_same_ends(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write(repository, "m", 1)
    one, two = ("m", "1", "READY", ""), ("m", "2", "READY", "")
    with serving_both(repository, "--model-control-mode=poll", "--repository-poll-secs=1") as both:
        both_come_to(both, one)
        write(tmp_path, "n", 1)
        (tmp_path / "n").rename(repository / "n")
        both_come_to(both, one, ("n", "1", "READY", ""))
        write(tmp_path, "next", 2, version=2)
        (tmp_path / "next" / "2").rename(repository / "m" / "2")
        both_come_to(both, ("m", "1", "UNAVAILABLE", "unloaded"), two, ("n", "1", "READY", ""))
        shutil.rmtree(repository / "n")
        both_come_to(both, ("m", "1", "UNAVAILABLE", "unloaded"), two)
        for client in both.clients:
            eventually(lambda: not_ready(client, "n"), "n is unloaded, as well as not in the index")  # noqa: B023
        compare(both, service_pb2.ModelInferRequest(model_name="n"))
        compare(both, service_pb2.RepositoryModelLoadRequest(model_name="m"))
        compare(both, service_pb2.RepositoryModelUnloadRequest(model_name="m"))
        # What is broken changes nothing.
        (repository / "m" / "config.pbtxt").write_text("max_batch_size: {")
        write(tmp_path, "seen", 1)
        (tmp_path / "seen").rename(repository / "seen")
        both_come_to(both, ("m", "1", "UNAVAILABLE", "unloaded"), two, ("seen", "1", "READY", ""))
        (repository / "m" / "config.pbtxt").write_text(CONFIG + "version_policy { all { } }")
        both_come_to(both, one, two, ("seen", "1", "READY", ""))


def not_ready(client: RawClient, name: str) -> bool:
    return bool(outcome(lambda: client("ModelReady", service_pb2.ModelReadyRequest(name=name))) == {})
