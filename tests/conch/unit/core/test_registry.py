"""The registry: which version serves, the texts where none does, and swaps under readers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from tests.support.core import WAIT_S, make_request, make_spec

from conch.core.errors import (
    ConchError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from conch.core.model_version import Model
from conch.core.registry import Entry, Registry, VersionState
from conch.core.route import WHOLE, Route
from conch.core.version_text import parse_version


class Named:
    """Stands in for a model."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.spec = make_spec(version=version)
        self.workers = self.readiness = ()


def models(*versions: int) -> dict[int, Model]:
    return {version: cast(Model, Named(version)) for version in versions}


READY = VersionState("READY")
GONE = VersionState("UNAVAILABLE", "unloaded")


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.publish("m", Entry(models(2, 10), {1: GONE, 2: READY, 10: READY, 11: VersionState("LOADING")}))
    registry.publish("off", Entry({}, {1: GONE}))
    return registry


@pytest.mark.parametrize(("version", "serves"), [("", 10), ("2", 2), ("10", 10), ("02", 2)])
def test_the_version_that_serves(registry: Registry, version: str, serves: int) -> None:
    assert registry.resolve("m", version) is registry.entries["m"].ready[serves]


@pytest.mark.parametrize(
    ("name", "version", "kind", "text"),
    [
        ("x", "", NotFoundError, "Request for unknown model: 'x' is not found"),
        ("x", "99", NotFoundError, "Request for unknown model: 'x' is not found"),
        ("m", "99", NotFoundError, "Request for unknown model: 'm' version 99 is not found"),
        ("off", "", NotFoundError, "Request for unknown model: 'off' has no available versions"),
        ("off", "1", UnavailableError, "Request for unknown model: 'off' version 1 is not at ready state"),
        ("m", "1", UnavailableError, "Request for unknown model: 'm' version 1 is not at ready state"),
        ("m", "11", UnavailableError, "Request for unknown model: 'm' version 11 is not at ready state"),
        (
            "m",
            "one",
            InvalidArgumentError,
            "failed to get model version from specified version string 'one' (details: stol), version "
            "should be an integral value > 0",
        ),
        (
            "x",
            "-1",
            InvalidArgumentError,
            "invalid model version specified '-1' , version should be an integral value > 0",
        ),
    ],
)
def test_texts(registry: Registry, name: str, version: str, kind: type[ConchError], text: str) -> None:
    with pytest.raises(ConchError) as caught:
        registry.resolve(name, version)
    assert (type(caught.value), caught.value.message) == (kind, text)


def test_parse_version() -> None:
    assert [parse_version(text) for text in ("", "1", "12", str(2**63 - 1))] == [-1, 1, 12, 2**63 - 1]


@pytest.mark.parametrize(
    "text", [str(2**63), "9" * 30, "9" * 5000, "-" + "9" * 5000, "1" * 10_000_000, "\u0663", "1_0", " 1"]
)
def test_what_no_version_can_be_is_refused_at_once(text: str) -> None:
    """Python refuses to read more than 4300 digits, and takes its time for a little less than that."""
    with pytest.raises(InvalidArgumentError) as caught:
        parse_version(text)
    message = caught.value.message
    start = f"failed to get model version from specified version string '{text[:20]}"
    assert message.startswith(start)
    assert message.endswith("' (details: stol), version should be an integral value > 0")
    assert len(message) < 1000


def test_models_that_keep_the_server_from_being_ready_are_known_without_a_look(registry: Registry) -> None:
    assert registry.unready == frozenset()
    for entry, unready in (
        (Entry({}, {1: VersionState("LOADING")}), {"new"}),
        (Entry({}, {1: VersionState("UNAVAILABLE", "Internal: boom")}), {"new"}),
        (Entry(models(1), {1: READY, 2: VersionState("LOADING")}), set()),
        (Entry(lacking=True), {"new"}),
        (Entry({}, {1: GONE, 2: VersionState("UNLOADING")}), set()),
        (Entry({}, {1: GONE, 2: VersionState("LOADING")}), {"new"}),
    ):
        registry.publish("new", entry)
        assert registry.unready == unready
    registry.remove("new")
    assert registry.unready == frozenset()


def test_a_removed_name_is_unknown(registry: Registry) -> None:
    registry.remove("m")
    registry.remove("never there")
    for version in ("", "2"):
        with pytest.raises(NotFoundError, match="is not found"):
            registry.resolve("m", version)
    assert set(registry.entries) == {"off"}


def test_a_name_without_ready_versions_is_served_no_more(registry: Registry) -> None:
    registry.publish("m", Entry({}, {10: GONE}))
    with pytest.raises(NotFoundError, match="has no available versions"):
        registry.resolve("m")


def test_entries_seen_earlier_do_not_change(registry: Registry) -> None:
    before = registry.entries
    registry.publish("m", Entry(models(3)))
    registry.publish("new", Entry(models(1)))
    assert set(before) == {"m", "off"}
    assert set(before["m"].ready) == {2, 10}


def test_readers_see_the_old_or_the_new_version_and_never_none() -> None:
    registry = Registry()
    first = models(1)
    registry.publish("m", Entry(first))
    stop = threading.Event()
    reading = threading.Barrier(4)

    def read() -> list[int]:
        seen: list[int] = []
        reading.wait(WAIT_S)
        while not stop.is_set():
            model = cast(Named, registry.resolve("m"))
            if not seen or seen[-1] != model.version:
                seen.append(model.version)
        return seen

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            reading.wait(WAIT_S)
            for version in range(2, 3000):
                registry.publish("m", Entry(models(version), {version: READY}))
                registry.publish(f"other-{version % 7}", Entry(models(1)))
        finally:
            stop.set()
        for reader in readers:
            seen = reader.result(WAIT_S)
            assert seen == sorted(seen), "went back to a version that had been replaced"


def text_of(registry: Registry, name: str, version: str) -> tuple[type[ConchError], str]:
    with pytest.raises(ConchError) as caught:
        registry.resolve(name, version)
    return type(caught.value), caught.value.message


def test_a_label_is_looked_up_where_the_version_is_no_number(registry: Registry) -> None:
    registry.set_labels("m", {"champion": 2, "stable": 10, "next": 11, "lost": 99}, "api")
    ready = registry.entries["m"].ready
    assert registry.resolve("m", "champion") is ready[2]
    assert registry.version_number("m", "next") == 11
    known = "; the labels of the model are 'champion' (2), 'lost' (99), 'next' (11), 'stable' (10)"
    start = "failed to get model version from specified version string 'x' (details: stol), "
    end = "version should be an integral value > 0"
    assert text_of(registry, "m", "x") == (InvalidArgumentError, f"{start}{end}{known}")
    assert text_of(registry, "off", "x") == (InvalidArgumentError, f"{start}{end}")
    assert text_of(registry, "m", "next") == (
        UnavailableError,
        "Request for unknown model: 'm' version 11, which label 'next' names, is not at ready state",
    )
    assert text_of(registry, "m", "lost") == (
        NotFoundError,
        "Request for unknown model: 'm' version 99, which label 'lost' names, is not found",
    )


def test_stable_is_what_an_empty_version_means_while_it_is_ready(registry: Registry) -> None:
    registry.set_labels("m", {"stable": 2}, "api")
    assert registry.resolve("m") is registry.entries["m"].ready[2]
    registry.publish("m", Entry(models(1, 10), {1: READY, 2: GONE, 10: READY}))
    assert registry.resolve("m") is registry.entries["m"].ready[10]
    registry.publish("m", Entry({}, {2: GONE, 10: GONE}))
    for version in ("", "stable"):
        assert text_of(registry, "m", version) == (
            UnavailableError,
            "Request for unknown model: 'm' version 2, which label 'stable' names, is not at ready state",
        )


def test_labels_outlive_versions_but_not_models(registry: Registry) -> None:
    registry.set_labels("m", {"old": 2}, "file")
    registry.set_labels("new", {"first": 1}, "file")
    registry.remove("m")
    registry.publish("m", Entry(models(2)))
    registry.publish("new", Entry(models(1, 2)))
    assert registry.resolve("m", "old") is registry.entries["m"].ready[2]
    assert registry.resolve("new", "first") is registry.entries["new"].ready[1]
    registry.forget("m")
    registry.publish("m", Entry(models(2)))
    assert not registry.labels("m")


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("8", "label '8' must begin with a letter"),
        ("a" * 65, "at most 64 characters"),
        ("a b", "label 'a b' must begin with a letter"),
    ],
)
def test_malformed_labels_are_refused(registry: Registry, label: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        registry.set_labels("m", {label: 2}, "api")
    assert not registry.labels("m")


def test_labels_of_a_file_are_changed_by_the_file(registry: Registry) -> None:
    registry.set_labels("m", {"champion": 2}, "file")
    with pytest.raises(FailedPreconditionError, match=r"are declared in rollout\.toml"):
        registry.refuse_label_change("m")
    registry.set_labels("m", {}, "file")
    registry.refuse_label_change("m")


def test_a_label_of_a_repository_moves_when_its_version_is_ready(registry: Registry) -> None:
    registry.follow_labels("m", {"stable": 2, "champion": 2})
    with pytest.raises(FailedPreconditionError, match="are those of its model repository"):
        registry.refuse_label_change("m")
    registry.follow_labels("m", {"stable": 11, "next": 11})
    # Version 2 serves until 11 does; a label that names no ready version has none to stay at.
    assert registry.labels("m") == {"stable": 2, "next": 11}
    registry.publish("m", Entry(models(2, 10), {2: READY, 10: READY}))
    assert registry.resolve("m") is registry.entries["m"].ready[2]
    registry.publish("m", Entry(models(11), {2: GONE, 11: READY}))
    assert registry.resolve("m") is registry.resolve("m", "stable") is registry.entries["m"].ready[11]
    registry.follow_labels("m", {})
    registry.set_labels("m", {"own": 11}, "api")
    registry.follow_labels("m", {})
    assert registry.labels("m") == {"own": 11}


def test_a_label_moves_in_one_step_for_readers() -> None:
    registry = Registry()
    registry.publish("m", Entry(models(1, 2)))
    registry.set_labels("m", {"stable": 1}, "api")
    ready = registry.entries["m"].ready
    stop = threading.Event()

    def read() -> bool:
        while not stop.is_set():
            if (
                registry.resolve("m") not in ready.values()
                or registry.resolve("m", "stable") not in ready.values()
            ):
                return False
        return True

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for turn in range(200):
            registry.set_labels("m", {"stable": turn % 2 + 1}, "api")
        stop.set()
        assert all(reader.result(WAIT_S) for reader in readers)


def test_a_routed_name_is_resolved_with_its_request(registry: Registry) -> None:
    ready = registry.entries["m"].ready
    registry.set_route("m", Route(2, 10, ((10, WHOLE),), override=False))
    request = make_request()
    assert registry.resolve_request(request) is ready[10]
    assert registry.resolve("m") is registry.entries["m"].default is ready[2]
    assert registry.resolve_early("m", "") is None
    assert (
        registry.resolve_early("m", "10") is registry.resolve_request(make_request(version="10")) is ready[10]
    )
    registry.publish("m", Entry(models(2), {2: READY, 10: GONE}))
    assert registry.resolve_request(request) is registry.entries["m"].ready[2]
    registry.publish("m", Entry(models(1, 10), {1: READY, 2: GONE, 10: READY}))
    assert registry.resolve_request(make_request()) is registry.entries["m"].ready[10]
    registry.publish("m", Entry({}, {2: GONE, 10: GONE}))
    with pytest.raises(UnavailableError, match="'m' version 2 is not at ready state"):
        registry.resolve_request(make_request())
    registry.publish("m", Entry(models(10), {2: GONE, 10: READY}))
    registry.set_route("m", None)
    assert registry.resolve_early("m", "") is registry.resolve_request(make_request()) is not None


def test_the_only_ready_model_of_a_name_may_have_a_route() -> None:
    registry = Registry()
    registry.add_namespaces("/a", "/b")
    registry.publish("/a::m", Entry(models(1, 2)))
    registry.publish("/b::m", Entry({}, {1: GONE}))
    registry.set_route("/a::m", Route(1, 2, ((2, WHOLE),)))
    ready = registry.entries["/a::m"].ready
    assert registry.resolve_request(make_request()) is ready[2]
    assert registry.resolve("m") is ready[1]
    registry.publish("/b::m", Entry(models(1)))
    with pytest.raises(InvalidArgumentError, match="2 identifiers of model 'm'"):
        registry.resolve_request(make_request())
    registry.set_route("/a::m", None)
    registry.publish("/b::m", Entry({}, {1: GONE}))
    assert registry.resolve("m") is ready[2]
