"""Mirrored models over both protocols: what a shadow finds, and that clients notice nothing of it."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.leaks import local_server
from tests.support.loading import write_ensemble
from tests.support.servers import WAIT_S, eventually, tensor, write_model
from tests.support.sharing import shared_object

from conch.core.clock import monotonic_ns
from conch.core.registry import Registry
from conch.core.route import WHOLE, Route
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.http.http_options import HttpOptions
from conch.server import InferenceServer
from conch.server_options import PartOptions
from conch_control.control_options import ControlOptions
from conch_rollout.shadows.comparison import CompareRules
from conch_rollout.shadows.shadow import MOST_SATURATION, Shadow, ShadowPolicy
from conch_rollout.shadows.shadow_metrics import shadow_families
from conch_rollout.shadows.shadow_service import Shadows

pytestmark = pytest.mark.slow

MODEL = '''
"""Version 2 adds 0.25. Fails for minus its version. Version 2 waits for a file for 100, and dies of -99."""
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])
        self.gate = Path(args["model_repository"]) / "gate"

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if value[0] == -self.version:
            return pb_utils.InferenceResponse([], pb_utils.TritonError("told to"))
        if value[0] == -99 and self.version == 2:
            os._exit(1)
        while value[0] == 100 and self.version == 2 and not self.gate.exists():
            time.sleep(0.01)
        value += 0.25 * (self.version - 1)
        seen = np.array([self.version - 1 if value[0] > 50 else 0], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value), pb_utils.Tensor("SEEN", seen)])
'''
STREAM = '''
"""Its input is the number of its responses; version 2 sends one less above 5."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(count - (self.version == 2 and count > 5)):
                out = pb_utils.Tensor("OUT", np.array([number], np.float32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
SUMS = '''
"""Sums of each sequence."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        key = request.correlation_id()
        before = 0 if request.flags() & 1 else self.sums[key]
        total = self.sums[key] = before + pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total)])
'''
CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
    version_policy {{ all {{ }} }}
    {extra}
"""
SEEN = 'output { name: "SEEN" data_type: TYPE_INT64 dims: [ 1 ] }'
SEQUENCES = (
    "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 4 } }"
)
WORKER = [pytest.mark.process, pytest.mark.slow]
DECOUPLED = "model_transaction_policy { decoupled: true }"


class Manual:
    """The threads of a shadow, by hand."""

    def __init__(self, compares: bool = True) -> None:
        self.copies: list[Callable[[], None]] = []
        self.pairs: list[Callable[[], None]] = []
        self.compares = compares

    def submit_soon(self, work: Callable[[], None]) -> None:
        self.copies.append(work)

    def compare_soon(self, work: Callable[[], None]) -> None:
        self.pairs.append(work)

    def run(self, number: int) -> None:
        """Submits so many copies once their requests are answered; clients have the answers before."""
        eventually(lambda: len(self.copies) == number, "requests are answered")
        while self.copies:
            self.copies.pop(0)()

    def compare(self, number: int) -> None:
        """Compares so many pairs once they have ended."""
        eventually(lambda: len(self.pairs) == number, "copies end")
        while self.pairs:
            self.pairs.pop(0)()


class Site(NamedTuple):
    """A server with its models' directory, and a client."""

    server: InferenceServer
    repository: Path
    http: str
    grpc: triton.InferenceServerClient

    @property
    def registry(self) -> Registry:
        return self.server.core.registry

    def by_grpc(self, value: float, model: str = "m", **more: Any) -> float:
        inputs = [tensor("IN", np.array([value], np.float32))]
        result = self.grpc.infer(model, inputs, client_timeout=WAIT_S, **more)
        return float(result.as_numpy("OUT")[0])

    def by_http(self, value: float, model: str = "m", request_id: str = "") -> float:
        body = {
            "id": request_id,
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [value]}],
        }
        answer = httpx.post(f"http://{self.http}/v2/models/{model}/infer", json=body).json()
        return float(answer["outputs"][0]["data"][0])

    def stream(self, count: int, model: str = "stream") -> list[float]:
        answers: list[Any] = []
        done = threading.Event()

        def take(result: Any, error: Any) -> None:
            answers.append(error or result)
            final = result is None or "triton_final_response" in result.get_response().parameters
            if final and result.get_response().parameters["triton_final_response"].bool_param:
                done.set()

        self.grpc.start_stream(take)
        try:
            inputs = [tensor("IN", np.array([count], np.float32))]
            self.grpc.async_stream_infer(model, inputs, enable_empty_final_response=True)
            assert done.wait(WAIT_S)
        finally:
            self.grpc.stop_stream()
        return [float(each.as_numpy("OUT")[0]) for each in answers[:-1]]


@pytest.fixture(scope="module", params=["in_process", pytest.param("worker", marks=WORKER)])
def module_site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None
) -> Iterator[Site]:
    repository = tmp_path_factory.mktemp("models")
    for name, text, extra in (
        ("m", MODEL, SEEN),
        ("stream", STREAM, DECOUPLED),
        ("sums", SUMS, SEQUENCES),
    ):
        write_model(repository, name, CONFIG.format(extra=extra), {"model.py": text}, (1, 2))
    ensemble = write_ensemble(repository, "around", "m")
    (ensemble / "2").mkdir()
    with (ensemble / "config.pbtxt").open("a") as config:
        config.write("version_policy { all { } }")
    control = ControlOptions(
        repositories=(repository,), backend_options={"python": {"placement": request.param}}
    )
    address = "127.0.0.1"
    server = InferenceServer(
        PartOptions(
            control=control,
            grpc=GrpcOptions(address=address, port=0),
            http=HttpOptions(address=address, port=0),
        )
    )
    with local_server():
        server.start()
        try:
            with closing(triton.InferenceServerClient(f"{address}:{server.port('gRPC')}")) as client:
                yield Site(server, repository, f"{address}:{server.port('HTTP')}", client)
        finally:
            assert server.stop()


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    yield module_site
    for name in ("m", "stream", "sums", "around"):
        module_site.registry.set_route(name, None)
    (module_site.repository / "m" / "gate").unlink(missing_ok=True)


@pytest.fixture
def shadows(site: Site) -> Iterator[Shadows]:
    made = Shadows()
    yield made
    assert made.stop(WAIT_S)


def opened(site: Site, shadows: Shadows, model: str = "m", **policy: Any) -> Shadow:
    """The shadow of a model whose version 2 gets copies."""
    shadow = shadows.open(model, 2, b"rollout", ShadowPolicy(**policy))
    assert shadow is not None
    site.registry.set_route(model, Route(1, 2, shadow=shadow))
    return shadow


def settled(shadow: Shadow, compared: int, ended: int | None = None) -> dict[str, Any]:
    """The report once so many pairs have been compared and copies ended."""
    eventually(lambda: shadow.report.compared >= compared, "pairs are compared")
    eventually(lambda: shadow.counts().ended >= (compared if ended is None else ended), "copies end")
    report = shadow.as_json()
    assert report["compared"] == compared
    return report


def inferences(site: Site, model: str = "m") -> dict[str, int]:
    """Successful requests by version."""
    stats = site.grpc.get_inference_statistics(model)
    return {each.version: each.inference_count for each in stats.model_stats}


def test_other_numbers_are_found_with_their_figures(site: Site, shadows: Shadows) -> None:
    before = inferences(site)
    shadow = opened(site, shadows)
    assert [site.by_grpc(float(value), request_id=f"g{value}") for value in range(1, 4)] == [1, 2, 3]
    assert [site.by_http(float(value), request_id=f"h{value}") for value in range(4, 6)] == [4, 5]
    report = settled(shadow, 5)
    assert (report["requests"], report["mismatches"], report["kinds"]) == (5, 5, {"values": 5})
    assert (report["max_abs"]["OUT"], report["max_abs"]["SEEN"]) == ([[0.3, 5]], [[1e-09, 5]])
    assert {pair["request_id"] for pair in report["worst"]} == {"g1", "g2", "g3", "h4", "h5"}
    figures = report["worst"][0]["outputs"]
    assert [(each["output"], each["max_abs"], each["within"]) for each in figures] == [("OUT", 0.25, 0.0)]
    json.dumps(report)
    after = inferences(site)
    assert {version: after[version] - before[version] for version in "12"} == {"1": 5, "2": 5}
    text = "".join(line for _, lines in shadow_families([shadow]) for line in lines)
    assert 'conch_shadow_mismatches_total{model="m",version="2"} 5\n' in text
    assert 'conch_shadow_max_abs_bucket{le="1",model="m",output="OUT",version="2"} 5\n' in text
    assert 'conch_shadow_max_abs_bucket{le="0.1",model="m",output="OUT",version="2"} 0\n' in text


def test_tolerances_and_ignored_outputs(site: Site, shadows: Shadows) -> None:
    shadow = opened(site, shadows, rules=CompareRules(atol=0.3))
    site.by_grpc(1.0)
    assert settled(shadow, 1)["mismatches"] == 0
    site.by_grpc(60.0)
    assert settled(shadow, 2)["worst"][0]["outputs"][0]["output"] == "SEEN"
    shadow = opened(site, shadows, rules=CompareRules(atol=0.3, ignore=frozenset(["SEEN"])))
    site.by_grpc(60.0)
    assert settled(shadow, 3)["mismatches"] == 1


def test_errors_of_one_side_are_mismatches(site: Site, shadows: Shadows) -> None:
    shadow = opened(site, shadows)
    with pytest.raises(triton.InferenceServerException, match="told to"):
        site.by_grpc(-1.0, request_id="stable fails")
    site.by_grpc(-2.0, request_id="candidate fails")
    report = settled(shadow, 2)
    assert (report["kinds"], report["failures"]) == ({"error": 2}, 1)
    notes = {pair["request_id"]: pair["outputs"][0]["note"] for pair in report["worst"]}
    assert notes == {
        "stable fails": "stable: INTERNAL, told to; candidate: an answer",
        "candidate fails": "stable: an answer; candidate: INTERNAL, told to",
    }


def test_a_slow_shadow_delays_nothing_and_is_bounded(site: Site, shadows: Shadows) -> None:
    """Version 2 does not answer at all, until all requests have been answered."""
    shadow = opened(site, shadows, inflight=2)
    for _ in range(5):
        assert site.by_grpc(100.0) == 100
        assert site.by_http(100.0) == 100
    eventually(lambda: shadow.counts().requests == 2, "two copies run")
    assert (shadow.counts().dropped, shadow.counts().ended) == ({"inflight": 8}, 0)
    (site.repository / "m" / "gate").touch()
    report = settled(shadow, 2)
    site.by_grpc(1.0)
    assert settled(shadow, 3)["dropped"] == report["dropped"], "there is room again"


@pytest.mark.slow
def test_a_busy_version_suspends_copies(site: Site) -> None:
    busy: dict[object, float] = {object(): MOST_SATURATION + 0.1}
    shadows = Shadows(lambda: busy)
    shadow = opened(site, shadows)
    try:
        eventually(lambda: shadow.suspended, "the load is seen")
        site.by_grpc(1.0)
        assert (shadow.counts().requests, shadow.counts().dropped) == (0, {"saturated": 1})
        busy.clear()
        busy[site.registry.entries["m"].ready[2].statistics.identity] = 1.0  # with copies
        eventually(lambda: not shadow.suspended, "the end of the load is seen")
        site.by_grpc(1.0)
        settled(shadow, 1)
    finally:
        assert shadows.stop(WAIT_S)


def test_streams(site: Site, shadows: Shadows) -> None:
    shadow = opened(site, shadows, "stream")
    assert site.stream(3) == [0, 1, 2]
    assert settled(shadow, 1)["mismatches"] == 0
    assert len(site.stream(9)) == 9
    report = settled(shadow, 2)
    assert report["worst"][0]["outputs"][0]["note"] == "9 against 8 responses"
    assert len(site.stream(1500)) == 1500
    report = settled(shadow, 3)
    assert report["mismatches"] == 1, "of long answers the beginnings are compared"


def test_sequences_are_mirrored_whole(site: Site, shadows: Shadows) -> None:
    def turn(sequence: int, value: float, **more: Any) -> float:
        return site.by_grpc(value, "sums", sequence_id=sequence, **more)

    assert turn(7, 1.0, sequence_start=True) == 1
    shadow = opened(site, shadows, "sums", inflight=1)
    assert turn(7, 2.0) == 3, "it began before, so it is not mirrored"
    assert turn(8, 10.0, sequence_start=True) == 10
    settled(shadow, 1)
    for number, total in enumerate((20, 30, 40)):
        assert turn(8, 10.0) == total
        assert settled(shadow, 2 + number)["mismatches"] == 0
    assert shadow.mirrors(8)
    assert turn(8, 0.0, sequence_end=True) == 40
    settled(shadow, 5)
    eventually(lambda: not shadow.mirrors(8), "its end is copied")
    assert turn(7, 0.0, sequence_end=True) == 3


def test_a_sequence_that_can_not_be_copied_any_more_ends(site: Site, shadows: Shadows) -> None:
    def turn(value: float, **more: Any) -> float:
        return site.by_grpc(value, "sums", sequence_id=9, **more)

    shadow = opened(site, shadows, "sums", inflight=0)
    assert turn(1.0, sequence_start=True) == 1
    assert shadow.counts().dropped == {"inflight": 1}
    opened(site, shadows, "sums", inflight=1)
    assert turn(1.0) == 2
    assert turn(1.0, sequence_start=True) == 1
    settled(shadow, 1)
    opened(site, shadows, "sums", inflight=0)
    assert turn(1.0) == 2
    held = site.registry.entries["sums"].ready[2]
    eventually(lambda: not held.live_sequences, "the candidate's sequence ends")
    assert turn(1.0, sequence_end=True) == 3
    assert (shadow.counts().requests, shadow.report.mismatches) == (1, 0)


def test_inputs_in_shared_memory(site: Site, shadows: Shadows) -> None:
    shadow = opened(site, shadows)
    with shared_object(4096) as memory:
        site.grpc.register_system_shared_memory("r", memory.key, 4096)
        try:
            given = triton.InferInput("IN", [1], "FP32")
            given.set_shared_memory("r", 4)
            wanted = [triton.InferRequestedOutput(name) for name in ("OUT", "SEEN")]
            wanted[0].set_shared_memory("r", 4, 8)

            def ask(value: float) -> float:
                memory.write(np.array([value], np.float32))
                site.grpc.infer("m", [given], outputs=wanted, client_timeout=WAIT_S)
                found = float(memory.read(1, 8)[0])
                memory.write(np.array([-2.0], np.float32))  # the client uses its memory again
                return found

            assert ask(5.0) == 5
            assert (shadow.counts().requests, shadow.counts().dropped) == (0, {"regions": 1})
            opened(site, shadows, copy_regions=True)
            assert ask(6.0) == 6
            report = settled(shadow, 1)
            assert report["worst"][0]["outputs"][0]["max_abs"] == 0.25
            message = [tensor("IN", np.array([7.0], np.float32))]
            opened(site, shadows, copy_regions=False)
            site.grpc.infer("m", message, outputs=wanted, client_timeout=WAIT_S)
            assert memory.read(1, 8)[0] == 7
            assert settled(shadow, 2)["failures"] == 0
        finally:
            site.grpc.unregister_system_shared_memory("r")


def test_a_share_of_the_requests(site: Site, shadows: Shadows) -> None:
    shadow = opened(site, shadows, share=0)
    site.by_grpc(1.0)
    opened(site, shadows, share=WHOLE)
    site.by_grpc(1.0, request_id="all")
    report = settled(shadow, 1)
    assert (report["requests"], report["worst"][0]["request_id"]) == (1, "all")


def test_tensors_are_captured_for_the_user_only(site: Site, tmp_path: Path) -> None:
    captured = tmp_path / "captured"
    shadows = Shadows(capture=captured)
    try:
        shadow = opened(site, shadows)
        for value in range(40):
            site.by_grpc(float(value))
            settled(shadow, value + 1)
        eventually(lambda: len(list(captured.iterdir())) == 32, "the worst pairs stay")
        names = [pair["file"] for pair in shadow.as_json()["worst"]]
        assert {path.name for path in captured.iterdir()} == set(names)
        path = captured / names[0]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with np.load(path) as arrays:
            assert arrays["candidate/0/OUT"] - arrays["stable/0/OUT"] == [0.25]
            assert arrays["input/IN"] == arrays["stable/0/OUT"]
    finally:
        assert shadows.stop(WAIT_S)


def by_hand(site: Site, threads: Manual, model: str = "m", route: tuple[int, int] = (1, 2)) -> Shadow:
    """A shadow whose threads are run by hand."""
    shadow = Shadow(model, route[1], ShadowPolicy(), threads, monotonic_ns)
    site.registry.set_route(model, Route(*route, shadow=shadow))
    return shadow


def test_inputs_and_answers_that_wait_are_bounded(site: Site) -> None:
    threads = Manual()
    shadow = by_hand(site, threads)
    large = [tensor("IN", np.full(24 << 18, 60.0, np.float32))]  # 24 MB, more than is kept of an answer
    for _ in range(3):
        site.grpc.infer("m", large, client_timeout=WAIT_S)
    assert shadow.counts().dropped == {"bytes": 1}
    threads.run(2)
    eventually(lambda: shadow.counts().ended == 2, "copies end")
    assert not threads.pairs, "such answers are not kept"
    site.grpc.infer("m", large, client_timeout=WAIT_S)
    assert shadow.counts().dropped == {"bytes": 1}, "there is room again"
    threads.run(1)
    eventually(lambda: shadow.counts().ended == 3, "the copy ends")


def test_without_time_for_comparisons_requests_are_copied_all_the_same(site: Site) -> None:
    threads = Manual(compares=False)
    shadow = by_hand(site, threads)
    site.by_grpc(1.0)
    threads.run(1)
    eventually(lambda: shadow.counts().ended == 1, "the copy ends")
    assert (threads.pairs, shadow.counts().compared) == ([], 0)


def test_a_request_that_its_client_gives_up_is_not_copied(site: Site) -> None:
    threads = Manual()
    shadow = by_hand(site, threads, route=(2, 1))
    first = threading.Thread(target=site.by_http, args=(100.0,))
    first.start()
    running = site.registry.entries["m"].ready[2].statistics.gauges
    eventually(lambda: running().running == 1, "the first one runs")
    with pytest.raises(triton.InferenceServerException, match="Deadline"):
        site.grpc.infer("m", [tensor("IN", np.ones(1, np.float32))], client_timeout=0.2)
    (site.repository / "m" / "gate").touch()
    first.join()
    assert site.by_grpc(1.0) == 1.25
    threads.run(2)
    threads.compare(2)
    assert (shadow.counts().requests, shadow.counts().dropped) == (2, {})


def test_steps_of_ensembles_are_copied_once(site: Site) -> None:
    """A step of the ensemble is mirrored; those of the ensemble's copy are not."""
    threads, outer = Manual(), Manual()
    shadow = by_hand(site, threads)
    around = Shadow("around", 2, ShadowPolicy(), outer, monotonic_ns)
    site.registry.set_route("around", Route(1, 2, shadow=around))
    assert site.by_grpc(1.0, "around") == 1
    outer.run(1)
    outer.compare(1)
    threads.run(1)
    threads.compare(1)
    assert (around.counts().mismatches, shadow.counts().mismatches) == (0, 1)


def test_no_answer_changes_while_shadows_come_and_go(site: Site, shadows: Shadows) -> None:
    stop = threading.Event()
    answers: dict[str, set[float]] = {"grpc": set(), "http": set()}
    asked = []

    def ask(protocol: str, way: Any) -> None:
        while not stop.is_set():
            answers[protocol].add(way(1.0))
            asked.append(protocol)

    threads = [
        threading.Thread(target=partial(ask, "grpc", site.by_grpc)),
        threading.Thread(target=partial(ask, "http", site.by_http)),
    ]
    site.registry.set_route("m", Route(1, 2))
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            for change in (
                partial(opened, site, shadows),
                partial(site.registry.set_route, "m", Route(1, 2)),
            ):
                change()
                before = len(asked)
                eventually(lambda: len(asked) > before + 6, "requests are answered")  # noqa: B023
            shadows.close("m")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert answers == {"grpc": {1.0}, "http": {1.0}}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("module_site", ["worker"], indirect=True)
def test_a_candidate_that_dies_differs(site: Site, shadows: Shadows) -> None:
    shadow = opened(site, shadows)
    assert site.by_grpc(-99.0) == -99
    report = settled(shadow, 1)
    assert (report["kinds"], report["failures"]) == ({"error": 1}, 1)
    assert "candidate: UNAVAILABLE, " in report["worst"][0]["outputs"][0]["note"]
