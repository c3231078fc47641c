"""Instances of compiled backends in a worker: which share a thread, and which load at the same time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from tests.support.core import make_spec
from tests.support.native_backends import NativeBackends, native_backends
from tests.support.workers import Begun, NoCalls, batch_of, request_of

from conch.backends.python.python_settings import Settings
from conch.core.errors import UnavailableError
from conch.core.execution.placement import Placement
from conch.core.request import InferenceResponse
from conch.core.spec import SequenceBatching, TensorSpec
from conch.ipc.spec_json import Library
from conch.workers.environment import server_environment
from conch.workers.supervision.process_monitor import ProcessMonitor
from conch.workers.supervision.worker_group import WorkerGroup
from conch.workers.supervision.worker_instance import WorkerInstance

__all__ = ["native_backends"]

pytestmark = [pytest.mark.process, pytest.mark.slow]

PLACEMENTS = [
    Placement("m_0", "GPU", 0),
    Placement("m_1", "GPU", 0),
    Placement("m_2", "GPU", 1),
    Placement("m_3", "CPU"),
]


@contextmanager
def opened(
    backends: NativeBackends,
    word: str = "",
    sequence: SequenceBatching | None = None,
    policies: Mapping[str, Mapping[str, str]] | None = None,
    groups: Sequence[Mapping[str, str]] = (),
) -> Iterator[list[WorkerInstance]]:
    spec = replace(
        make_spec(inputs=(TensorSpec("IN", "INT64", (1,)),), sequence=sequence),
        outputs=(TensorSpec("OUT", "INT64", (2,)),),
        config={"name": word, "instance_group": groups},
    )
    environment = server_environment({})
    library = Library("devices", backends.build("devices"), {}, backends.host, policies or {})
    instances = WorkerInstance.open_shared(
        spec,
        PLACEMENTS,
        Settings.of(spec),
        environment,
        NoCalls(),
        ProcessMonitor(),
        WorkerGroup(),
        library,
    )
    try:
        yield instances
    finally:
        for instance in instances:
            instance.close()
        environment.release()


def answered(instances: list[WorkerInstance]) -> list[InferenceResponse]:
    """The responses to batches that were begun together."""
    begun = []
    for instance in instances:
        request, _ = request_of(IN=np.zeros(1, np.int64))
        begun.append(Begun(batch_of(request)))
        instance.start(begun[-1].batch, begun[-1].done)
    found = []
    for each in begun:
        (response,) = each.result()
        assert response is not None
        found.append(response)
    return found


def executed(instances: list[WorkerInstance]) -> list[list[int]]:
    """The threads of batches that were begun together, and how many ran at once on their devices."""
    return [response.outputs[0].numpy().tolist() for response in answered(instances)]


def test_instances_on_a_gpu_share_a_thread(native_backends: NativeBackends) -> None:
    with opened(native_backends) as instances:
        rounds = [executed(instances) for _ in range(20)]
    for found in rounds:
        assert found == rounds[0]  # each batch runs on the same thread
    first, second, third, fourth = rounds[0]
    assert first == second
    assert len({first[0], third[0], fourth[0]}) == 3
    assert {at_once for _, at_once in rounds[0]} == {1}


def test_instances_of_a_sequence_model_have_threads_of_their_own(native_backends: NativeBackends) -> None:
    with opened(native_backends, sequence=SequenceBatching()) as instances:
        assert len({thread for thread, _ in executed(instances)}) == len(PLACEMENTS)


def test_instances_load_at_the_same_time_if_the_backend_allows_it(native_backends: NativeBackends) -> None:
    with opened(native_backends, "together"):
        pass


def test_a_variable_makes_instances_load_one_by_one(
    native_backends: NativeBackends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_PARALLEL_INSTANCE_LOADING", "0")
    with opened(native_backends, "apart"):
        pass


def test_instances_run_where_their_host_policies_say(native_backends: NativeBackends) -> None:
    usable = os.sched_getaffinity(0)
    core, every = min(usable), sum(1 << each for each in usable)
    cores = {"cpu-cores": f"{core}-{core}"}
    policies = {"gpu_0": cores, "own": {"color": "red"}}
    with opened(native_backends, policies=policies) as instances:
        found = [response.parameters for response in answered(instances)]
    wanted = [("gpu_0", cores, 1 << core)] * 2 + [("gpu_1", {}, every), ("cpu", {}, every)]
    for given, (name, settings, processors) in zip(found, wanted, strict=True):
        assert given is not None
        assert json.loads(str(given["policy"])) == {name: settings}
        assert (given["loaded_on"], given["executes_on"]) == (processors, processors)
    with opened(
        native_backends, policies=policies, groups=({"name": "m", "host_policy": "own"},)
    ) as instances:
        for response in answered(instances):
            assert response.parameters is not None
            assert json.loads(str(response.parameters["policy"])) == {"own": {"color": "red"}}


def test_a_host_policy_that_the_machine_can_not_follow_fails_the_load(
    native_backends: NativeBackends,
) -> None:
    with (
        pytest.raises(UnavailableError, match=r"host policy 'cpu' \(cpu-cores=4000-4001\) can't be applied"),
        opened(native_backends, policies={"cpu": {"cpu-cores": "4000-4001"}}),
    ):
        pass
