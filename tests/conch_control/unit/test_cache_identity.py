"""Models that are put behind the cache, and loads that share its entries."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.support.caches import NetworkCache
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.core.model_version import Model
from conch.core.response_cache.cache_service import CacheService
from conch.core.response_cache.cached_model import CachedModel
from conch.core.response_cache.local_cache import LocalCache
from conch.core.route import Route
from conch_control.lifecycle.cache_identity import EnsembleCacheIdentity, content_digest
from conch_control.lifecycle.ensemble_loader import EnsembleError

if TYPE_CHECKING:
    from tests.support.sites import Site

CACHED = "response_cache { enable: true }"


def hits(site: Site) -> int:
    return site.serving("m")[1].statistics.snapshot().cache_hit.count


@pytest.fixture
def local() -> Iterator[LocalCache]:
    with closing(LocalCache(100_000)) as cache:
        yield cache


def test_only_models_that_want_it_are_behind_the_cache(site: Site, local: LocalCache) -> None:
    site.model("m", config=site.config(CACHED))
    site.model("plain")
    agent = site.agent(cache=CacheService(local))
    agent.load("m", {})
    agent.load("plain", {})
    assert isinstance(site.serving("m")[1], CachedModel)
    assert type(site.serving("plain")[1]) is Model
    for _ in range(2):
        assert site.send("m").error() is site.send("plain").error() is None
    assert hits(site) == 1
    assert local.snapshot().entries == 1


def test_without_a_cache_the_wish_is_told_and_ignored(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m", config=site.config(CACHED))
    site.agent().load("m", {})
    assert type(site.serving("m")[1]) is Model
    assert "model 'm' enables the response cache, but the server has none (--cache-config)" in caplog.text


def test_a_reload_starts_anew_in_a_local_cache(site: Site, local: LocalCache) -> None:
    directory = site.model("m", config=site.config(CACHED))
    agent = site.agent(cache=CacheService(local))
    agent.load("m", {})
    assert site.send("m").error() is None
    os.utime(directory / "1" / "model.echo", (1, 1))  # the same file, but who knows what else changed
    agent.load("m", {})
    assert site.send("m").error() is None
    assert hits(site) == 0
    assert site.send("m").error() is None
    assert hits(site) == 1
    assert local.snapshot().entries == 2


@pytest.fixture
def network() -> Iterator[tuple[NetworkCache, CacheService]]:
    cache = NetworkCache()
    with closing(CacheService(cache)) as service:
        yield cache, service


@pytest.mark.parametrize(
    ("change", "shared"), [("nothing", True), ("time", True), ("file", False), ("config", False)]
)
def test_loads_share_a_shared_cache_while_the_files_are_the_same(
    site: Site, network: tuple[NetworkCache, CacheService], change: str, shared: bool
) -> None:
    cache, service = network
    directory = site.model("m", config=site.config(CACHED))
    agent = site.agent(cache=service)
    agent.load("m", {})
    assert site.send("m").error() is None
    eventually(lambda: len(cache.entries) == 1, "the response is kept")
    agent.unload("m", False)
    match change:
        case "time":
            os.utime(directory / "1" / "model.echo", (1, 1))
        case "file":
            (directory / "1" / "model.echo").write_text("ok ")
        case "config":
            site.model("m", config=site.config(CACHED, "version_policy { all {} }"))
    agent.load("m", {})
    assert site.send("m").error() is None
    if shared:
        assert hits(site) == 1
    else:
        assert hits(site) == 0
        eventually(lambda: len(cache.entries) == 2, "the response is kept under another key")


def test_files_that_change_while_a_model_is_loaded(
    site: Site, network: tuple[NetworkCache, CacheService], caplog: pytest.LogCaptureFixture
) -> None:
    """The files that were loaded are not known, so the responses are not shared."""
    cache, service = network
    directory = site.model("m", {1: "slowly"}, config=site.config(CACHED))
    agent = site.agent(cache=service)
    loading = threading.Thread(target=agent.load, args=("m", {}))
    loading.start()
    assert site.backend.loading.acquire(timeout=PATIENCE_S)
    (directory / "1" / "model.echo").write_text("ok")
    site.backend.gate.set()
    loading.join()
    assert "the files of model 'm' version 1 changed while it was loaded" in caplog.text
    assert site.send("m").error() is None
    eventually(lambda: len(cache.entries) == 1, "the response is kept")
    agent.load("m", {})
    assert site.send("m").error() is None
    eventually(lambda: len(cache.entries) == 2, "the response is kept under another key")


def test_what_a_digest_covers(site: Site) -> None:
    directory = site.model("m", {1: "ok", 2: "ok"}, config=site.config(CACHED, "version_policy { all {} }"))
    agent = site.agent()
    agent.load("m", {})
    one, two = (site.serving("m")[version].spec for version in (1, 2))
    digest = content_digest(one)
    assert digest != content_digest(two)
    (directory / "2" / "model.echo").write_text("changed")
    (directory / "1" / "__pycache__").mkdir()
    (directory / "1" / "__pycache__" / "x.pyc").write_text("x")
    assert content_digest(one) == digest
    assert content_digest(replace(one, backend_options={"threads": "1"})) != digest
    (directory / "labels.txt").write_text("cat")
    assert content_digest(one) != digest


def test_a_file_that_can_not_be_read_makes_a_digest_nobody_else_has(site: Site) -> None:
    directory = site.model("m")
    site.agent().load("m", {})
    spec = site.serving("m")[1].spec
    (directory / "gone").symlink_to("nowhere")
    assert content_digest(spec) != content_digest(spec)


SEQUENCES = "max_batch_size: 4\nsequence_batching { }"


def ensemble_of(model: str, *more: str) -> str:
    """An ensemble of one model, or of one that is called ``inner`` and is such an ensemble."""
    output = "Y" if model == "inner" else "X"
    return "\n".join(
        [
            'platform: "ensemble"',
            'input { name: "X" data_type: TYPE_UINT8 dims: 1 }',
            'output { name: "Y" data_type: TYPE_UINT8 dims: 1 }',
            f'ensemble_scheduling {{ step {{ model_name: "{model}" model_version: -1',
            'input_map { key: "X" value: "X" }',
            f'output_map {{ key: "{output}" value: "Y" }} }} }}',
            *more,
        ]
    )


@pytest.mark.parametrize("part", ["m", "inner"])
def test_an_ensemble_with_sequences_somewhere_in_it_is_not_cached(
    site: Site, local: LocalCache, part: str
) -> None:
    site.model("m", config=site.config(SEQUENCES))
    site.model("inner", config=ensemble_of("m"))
    site.model("e", config=ensemble_of(part, CACHED))
    agent = site.agent(cache=CacheService(local))
    with pytest.raises(EnsembleError) as raised:
        agent.load("e", {})
    assert raised.value.reason == (
        "Response Cache does not currently support model e with sequence batching scheduler. Please disable "
        "the response cache."
    )
    site.model("e", config=ensemble_of(part))
    agent.load("e", {})


def test_an_ensemble_is_not_cached_while_a_part_has_a_route(site: Site, local: LocalCache) -> None:
    """Its responses depend on the side that a request sees."""
    site.model("m")
    site.model("inner", config=ensemble_of("m"))
    site.model("e", config=ensemble_of("inner", CACHED))
    agent = site.agent(cache=CacheService(local))
    agent.load("e", {})
    identity = EnsembleCacheIdentity(site.serving("e")[1].spec, site.registry)
    before = identity()
    assert identity() == before
    site.registry.set_route("m", Route(1))
    assert len({before, identity(), identity()}) == 3
    site.registry.set_route("m", None)
    assert identity() == before


@pytest.mark.parametrize("part", ["m", "inner"])
def test_an_ensemble_is_cached_no_more_once_a_part_has_sequences(
    site: Site, local: LocalCache, part: str
) -> None:
    """The ensemble goes on as it was, but what it answers now depends on what was asked before."""
    site.model("m")
    site.model("inner", config=ensemble_of("m"))
    site.model("e", config=ensemble_of(part, CACHED))
    agent = site.agent(cache=CacheService(local))
    agent.load("e", {})
    cached = site.serving("e")[1]
    for _ in range(2):
        assert site.send("e").error() is None
    assert cached.statistics.snapshot().cache_hit.count == 1
    site.model("m", config=site.config(SEQUENCES))
    agent.load("m", {})
    assert site.serving("e")[1] is cached
    identity = EnsembleCacheIdentity(cached.spec, site.registry)
    assert len({identity() for _ in range(3)}) == 3


def test_the_identity_of_nested_parts_is_that_of_what_is_in_them(site: Site) -> None:
    """An ensemble inside that can't be loaded anew with its part is the same, but answers otherwise."""
    site.model("m", config=site.config("max_batch_size: 4"))
    site.model("inner", config=ensemble_of("m", "max_batch_size: 4"))
    site.model("e", config=ensemble_of("inner", "max_batch_size: 4", CACHED))
    agent = site.agent()
    agent.load("e", {})
    identity = EnsembleCacheIdentity(site.serving("e")[1].spec, site.registry)
    before = identity()
    assert identity() == before
    inner = site.serving("inner")
    site.model("m", config=site.config("max_batch_size: 2"))
    agent.load("m", {})
    assert site.serving("inner") == inner
    assert identity() != before
    assert identity() == identity()
