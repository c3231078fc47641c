"""The wrappers of a request's responder lie around it in the order of their list."""

from __future__ import annotations

import ast
import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.core import Answers, LoadedModel, echo, make_request, make_spec
from tests.support.sharing import shared_object

from conch.access.access_guard import EVERYTHING, Access
from conch.access.metered_admission import MeteredAdmission
from conch.access.policy_file import Policy
from conch.access.policy_state import PolicyState
from conch.core.clock import monotonic_ns
from conch.core.model_version import Model
from conch.core.registry import Entry, Registry, VersionState
from conch.core.request import InferenceRequest, Responder
from conch.core.request_log import REQUESTS
from conch.core.responder_layers import ResponderLayer
from conch.core.response_cache.cache_key import KeyMaker
from conch.core.response_cache.cached_model import CachedModel
from conch.core.response_cache.local_cache import LocalCache
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import Servable
from conch.core.server_stage import ServerStages
from conch.core.spec import DynamicBatching, ModelSpec
from conch.memory.region_bindings import RegionBindings
from conch.memory.regions import Regions
from conch.observability.logging.access_log import AccessLog
from conch.observability.logging.log_settings import AccessLogOptions
from conch.observability.request_watch import RequestWatches
from conch.observability.tracing.trace_settings import TraceSettings
from conch.observability.tracing.tracer import Tracer

LAYERS = list(ResponderLayer)
BATCHED = make_spec(8, batching=DynamicBatching(preserve_ordering=True))


class Call:
    """A client's call with a grant."""

    read_ns = 0
    path = ""
    client = "c"
    access = EVERYTHING

    def header(self, name: str) -> str:
        return ""

    def add_response_metadata(self, name: str, value: str) -> None:
        """Nothing reads it."""


class Noting(InferenceRequest):
    """Notes the layers in the order of the calls."""

    added: list[ResponderLayer]

    def wrap_responder(self, between: Callable[[Responder], Responder], layer: ResponderLayer) -> None:
        self.added = [*getattr(self, "added", ()), layer]
        super().wrap_responder(between, layer)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbose lines are logged."""
    monkeypatch.setattr(REQUESTS, "on", True)


def kept(batch: Batch) -> Any:
    """Answers when the batch is over, with its final flag alone behind."""
    for request, response in zip(batch.requests, echo(batch), strict=True):
        request.respond(response, False)
        request.respond(None)


def run(spec: ModelSpec, cached: bool, request: InferenceRequest, single: str | None = None) -> None:
    """Runs a request with a policy, an access log and verbose lines."""
    model: Servable = Model.create(spec, LoadedModel(kept if spec.decoupled else echo))
    if cached:
        keys = KeyMaker(spec, b"load", hashlib.sha256)
        model = CachedModel(model, LocalCache(1_000_000), keys, monotonic_ns)
    registry = Registry()
    registry.publish("m", Entry({1: model}, {1: VersionState("READY")}))
    log = AccessLog(AccessLogOptions(), lambda: False, io.StringIO())
    watches = RequestWatches(log, Tracer(TraceSettings()))
    access = Access(PolicyState(Policy(())))
    admission = MeteredAdmission(access, registry, "grpc", ServerStages(), watches)
    try:
        claim = admission.admit(request, True, caller=Call(), single=single)
        if claim is not None:
            claim.run_inline()
        assert isinstance(request.context, Answers) and request.context.wait(1)
    finally:
        assert model.close() and log.close()


def request_for(spec: ModelSpec) -> Noting:
    """A request whose answers are its context."""
    answers = Answers()
    like = make_request(rows=1 if spec.max_batch_size else None)
    request = Noting("m", "", like.inputs, answers, 0)
    request.context = answers
    return request


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize(
    ("spec", "cached", "expected"),
    [
        (BATCHED, True, "LIMIT WATCH CACHE LINES ORDER"),
        (make_spec(decoupled=True), False, "LIMIT WATCH SINGLE LINES TRACKER"),
    ],
)
def test_the_calls_come_in_the_order_of_the_list(spec: ModelSpec, cached: bool, expected: str) -> None:
    request = request_for(spec)
    run(spec, cached, request, single="one only")
    assert [layer.name for layer in request.added] == expected.split()
    assert request.added == sorted(request.added, key=LAYERS.index)


@pytest.mark.usefixtures("lines")
def test_nothing_that_only_looks_at_responses_is_outside_the_regions() -> None:
    spec = make_spec()
    with shared_object(4096) as memory, closing(Regions()) as regions:
        regions.register_system("r", memory.key, 0, 4096)
        request = request_for(spec)
        request.region_bindings = bindings = RegionBindings(regions)
        bindings.output("r", 0, 64, "OUT")
        run(spec, False, request)
        assert request.responder is bindings
    # A watch and lines go inside the regions, whenever they are added.
    assert [layer.name for layer in request.added] == ["LIMIT", "REGIONS", "WATCH", "LINES"]
    inside = [layer for layer in request.added if layer.inside_regions]
    assert inside == [ResponderLayer.WATCH, ResponderLayer.LINES]


def _calls() -> Iterator[ast.Call]:
    for path in Path(__file__).parents[4].glob("[cs]*/conch*/**/*.py"):
        text = path.read_text()
        if "wrap_responder(" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "wrap_responder":
                    yield node


def test_each_layer_is_used() -> None:
    names = [ast.unparse(call.args[1]) for call in _calls()]
    assert set(names) == {str(layer) for layer in ResponderLayer}
