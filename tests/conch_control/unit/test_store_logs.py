"""Requests to a store at a look, and log lines about one that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.stores import HangingStore
from tests.support.waiting import PATIENCE_S

from conch_control.control_options import ControlOptions
from conch_control.planner.snapshot import SnapshotReader
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource, Repository
from conch_stores.cache import ModelCache
from conch_stores.connection import Connection, StoreTimeouts
from conch_stores.credentials import CredentialReader
from conch_stores.locations import Location, parse_location
from conch_stores.objects import ObjectRepository
from conch_stores.stores import StoreBusyError, StoredObject

PATIENCE = StoreTimeouts(
    total_s=PATIENCE_S, attempt_s=PATIENCE_S, open_s=PATIENCE_S, first_wait_s=0.001, longest_wait_s=0.001
)


class Scripted:
    """A store that has one model, and says what a test has written down before it answers.

    Attributes:
        failures: Errors of its next listings.
        listed: Prefixes that were listed.
    """

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.listed: list[str] = []

    async def list(self, prefix: str) -> list[StoredObject]:
        self.listed.append(prefix)
        if self.failures:
            raise self.failures.pop(0)
        return [StoredObject("m/config.pbtxt", 0, "etag", 0)]

    async def close(self) -> None:
        """It holds nothing."""


@contextmanager
def opened(store: Scripted, cache: Path, clock: list[float]) -> Iterator[ObjectRepository]:
    """The repository in a store."""
    location = parse_location("s3://b")
    assert isinstance(location, Location)

    async def open_store(*_: Any) -> Any:
        return store

    connection = Connection(location, open_store, CredentialReader({}), PATIENCE)
    with closing(ObjectRepository(connection, ModelCache(cache), lambda: clock[0])) as repository:
        yield repository


def test_a_look_takes_what_the_listing_says_however_long_ago_that_was(tmp_path: Path) -> None:
    """Another repository may take long; to ask for each model would take longer, or hang."""
    store, clock = Scripted(), [0.0]

    def take_long(source: ModelSource) -> None:
        clock[0] += 10

    with opened(store, tmp_path, clock) as repository:
        reader = SnapshotReader(Repositories([repository]), ControlOptions(()), take_long)
        first, second = (reader.poll_all(lambda: False) for _ in range(2))
        assert first.models.keys() == {"m"}
        assert first == second
        assert store.listed == ["", ""]


def test_why_something_is_tried_again_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Scripted()
    with caplog.at_level(logging.INFO), opened(store, tmp_path, [0.0]) as repository:
        store.failures = [
            StoreBusyError("503"),
            StoreBusyError("503"),
            StoreBusyError("429"),
            StoreBusyError("503"),
        ]
        repository.models()
        store.failures = [StoreBusyError("503")]
        repository.models()
    said = [message for message in caplog.messages if "trying again" in message]
    assert said == [f"model repository 's3://b': {number}; trying again" for number in (503, 429, 503, 503)]


@pytest.mark.parametrize("beside", [False, True])
def test_a_repository_that_can_not_be_read_is_named_once(
    beside: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Scripted()
    store.failures = [OSError("no such bucket")]
    with opened(store, tmp_path, [0.0]) as repository:
        both: list[Repository] = [repository, HangingStore("/local")] if beside else [repository]
        with closing(Repositories(both)) as repositories:
            assert repositories.scan().unreadable == {"s3://b": "no such bucket"}
    assert caplog.messages == ["failed to read model repository 's3://b': no such bucket"]
