"""Makes the answer of a route from the deltas of a model: whole, or event by event."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from conch.core.errors import ConchError
from conch_llm.deltas import Delta
from conch_llm.frontend.openai_answers import Usage


class Collector(Protocol):
    """Collects an answer that is sent as a whole.

    Attributes:
        usage: Usage so far.
    """

    @property
    def usage(self) -> Usage:
        """See above."""

    def add(self, deltas: Iterable[Delta]) -> None:
        """Adds deltas."""

    def body(self) -> bytes:
        """The answer; called once, behind the last delta."""


class Encoder(Protocol):
    """Encodes an answer as events.

    Attributes:
        usage: Usage so far; the caller adds deltas on arrival, which may be before they are encoded.
    """

    @property
    def usage(self) -> Usage:
        """See above."""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events of deltas."""

    def end(self) -> bytes:
        """The events behind the last delta."""

    def failure(self, error: ConchError) -> bytes:
        """The events of an error in mid-stream."""


class AnswerMaker(ABC):
    """Form of one answer."""

    @abstractmethod
    def whole(self) -> Collector:
        """For an answer that is sent as a whole."""

    @abstractmethod
    def streamed(self) -> Encoder:
        """For an event stream."""
