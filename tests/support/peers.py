"""A real Triton beside conch, with the same models, for tests that compare the two."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from tests.support.cases import outcome
from tests.support.servers import PEERS, WAIT_S, RawClient, eventually, free_port, serving_process
from tritonclient.grpc import service_pb2

SITE = PEERS / "triton" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
TRITON = SITE / "pytriton" / "tritonserver"
NEEDS_TRITON = [
    pytest.mark.peer,
    pytest.mark.skipif(
        not (TRITON / "bin" / "tritonserver").exists(),
        reason=f"no Triton in {PEERS}; make bench-setup installs it",
    ),
]
"""Marks of a module whose tests need it."""


_NO_ID = "[request id: <id_unknown>] "
"""Prefix of Triton for a request without an id, which conch has for some errors only."""


@dataclass(frozen=True)
class Both:
    """Clients of both servers."""

    triton: RawClient
    conch: RawClient

    @property
    def clients(self) -> tuple[RawClient, RawClient]:
        """Triton's, and conch's."""
        return self.triton, self.conch


@contextmanager
def triton_serving(repository: Path, *more: str, port: int | None = None) -> Iterator[RawClient]:
    """A client of a Triton with more flags that serves a repository, into which it also writes its log."""
    port = port or free_port()
    base = Path(sys.base_prefix) / "lib"
    environment = {
        "LD_LIBRARY_PATH": f"{SITE / 'nvidia_pytriton.libs'}:{base}",
        "PYTHONPATH": str(SITE),
        "PATH": f"{PEERS / 'triton' / 'bin'}:/usr/bin:/bin",
    }
    flags = [f"--grpc-port={port}", "--allow-http=false", "--allow-metrics=false", *more]
    with (repository / "triton.log").open("w") as log:
        process = subprocess.Popen(
            [
                TRITON / "bin" / "tritonserver",
                f"--model-repository={repository}",
                f"--backend-directory={TRITON / 'backends'}",
                *flags,
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        with closing(RawClient(f"127.0.0.1:{port}")) as client:
            eventually(lambda: ready(client), "Triton is ready", 60)
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pass  # not for these tests to judge
        finally:
            process.kill()
            process.wait(WAIT_S)


@contextmanager
def serving_both(repository: Path, *flags: str) -> Iterator[Both]:
    """Both servers, with the same flags and the models of a repository, which are written in Python."""
    uploads = ("--allow-model-upload",) if "--model-control-mode=explicit" in flags else ()
    with (
        serving_process(repository, flags=(*flags, *uploads)) as server,
        closing(RawClient(server.address)) as conch,
        triton_serving(repository, *flags) as triton,
    ):
        assert ready(conch)
        yield Both(triton, conch)


def ready(client: RawClient) -> bool:
    try:
        return bool(client("ServerReady", service_pb2.ServerReadyRequest()).ready)
    except grpc.RpcError:
        return False


def text_of(error: Any) -> str:
    """Text of a gRPC error, without the id of a request that has none."""
    return (error.details() or "").replace(_NO_ID, "")


def outcomes(both: Both, message: Any) -> tuple[Any, Any]:
    """Sends a message to Triton and to conch; an error names no missing id."""
    theirs, ours = (outcome(partial(client.unary, message)) for client in both.clients)
    return without_missing_id(theirs), without_missing_id(ours)


def without_missing_id(outcome: Any) -> Any:
    return (outcome[0], str(outcome[1]).replace(_NO_ID, "")) if isinstance(outcome, tuple) else outcome


def agrees(ours: Any, theirs: Any) -> bool:
    """Compares two outcomes; an error of conch may say more behind Triton's text; a missing id is left out.

    Args:
        ours: Conch's answer as plain data, or the error's code, or status, and text.
        theirs: Triton's.
    """
    ours, theirs = without_missing_id(ours), without_missing_id(theirs)
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and ours[0] == theirs[0]:
        return bool(ours[1].startswith(theirs[1]))
    return bool(ours == theirs)


def compare(both: Both, message: Any) -> None:
    """Sends a message to both, whose answers must agree."""
    theirs, ours = outcomes(both, message)
    assert agrees(ours, theirs), f"{ours} != {theirs}"


def streamed(both: Both, *requests: Any) -> tuple[list[Any], list[Any]]:
    """All that Triton and conch answer to requests on a stream, as plain data."""
    theirs, ours = (
        [MessageToDict(message, preserving_proto_field_name=True) for message in client.stream(requests)]
        for client in both.clients
    )
    return theirs, ours


def counts(client: RawClient, model: str) -> dict[Any, int]:
    """Counts of a server for a model: requests by their ends, and executions by batch size."""
    (stats,) = client.unary(service_pb2.ModelStatisticsRequest(name=model)).model_stats
    durations = {field.name: value.count for field, value in stats.inference_stats.ListFields()}
    batches = {row.batch_size: row.compute_infer.count for row in stats.batch_stats}
    return {"inferences": stats.inference_count, "runs": stats.execution_count, **durations, **batches}


class Growth:
    """Growth of the counts of models on both servers since it was made."""

    def __init__(self, both: Both, *models: str) -> None:
        self._both = both
        self._models = models
        self._before = self._read()

    def __call__(self) -> list[dict[Any, int]]:
        """The differences on Triton, and on conch."""
        return [
            {key: count - old.get(key, 0) for key, count in new.items()}
            for old, new in zip(self._before, self._read(), strict=True)
        ]

    def _read(self) -> list[dict[Any, int]]:
        return [
            {(model, key): count for model in self._models for key, count in counts(client, model).items()}
            for client in self._both.clients
        ]
