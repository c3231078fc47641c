"""Limits of what a peer may cost, and why a connection was closed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conch.frontends.grpc.http2.frames import (
    DEFAULT_WINDOW,
    LEAST_FRAME_SIZE,
    MOST_FRAME_SIZE,
    MOST_WINDOW,
    ErrorCode,
)

# What is counted over time is counted for two periods: for the last 5 to 10 s.
PERIOD_NS = 5_000_000_000
PERIODS_S = 10


class Reason(StrEnum):
    """Reason for which a connection was closed; a label of a counter."""

    PREFACE = "preface"
    PROTOCOL = "protocol"
    FRAME_SIZE = "frame_size"
    FLOW_CONTROL = "flow_control"
    COMPRESSION = "compression"
    STREAM_CLOSED = "stream_closed"
    CONTINUATIONS = "continuations"
    HEADER_BLOCK = "header_block"
    HEADER_LIST = "header_list"
    CONTROL_FRAME = "control_frame"
    EMPTY_DATA = "empty_data"
    IDLE_FRAMES = "idle_frames"
    PINGS = "pings"
    SETTINGS = "settings"
    UNSENT_ACKS = "unsent_acks"
    WINDOW_UPDATES = "window_updates"


class ConnectionViolation(Exception):
    """A connection error (section 5.4.1): code and text of GOAWAY, and the reason to count."""

    def __init__(self, code: ErrorCode, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason
        self.text = text


@dataclass(frozen=True)
class LocalSettings:
    """Windows and SETTINGS that this side announces."""

    initial_window: int = 4 * 2**20
    connection_window: int = 64 * 2**20
    max_frame_size: int = 2**20
    max_concurrent_streams: int = 1024
    max_header_list_bytes: int = 16_384
    header_table_bytes: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.initial_window <= MOST_WINDOW:
            raise ValueError(f"initial_window must be from 0 to {MOST_WINDOW}")
        if not DEFAULT_WINDOW <= self.connection_window <= MOST_WINDOW:
            raise ValueError(f"connection_window must be from {DEFAULT_WINDOW} to {MOST_WINDOW}")
        if not LEAST_FRAME_SIZE <= self.max_frame_size <= MOST_FRAME_SIZE:
            raise ValueError(f"max_frame_size must be from {LEAST_FRAME_SIZE} to {MOST_FRAME_SIZE}")


@dataclass(frozen=True)
class Http2Limits:
    """Limits of a peer; above one, but for `resets`, its connection is closed with ENHANCE_YOUR_CALM."""

    continuations: int = 8
    header_block_bytes: int = 65_536
    # Of SETTINGS, GOAWAY and the like, which are read whole.
    control_frame_bytes: int = 16_384
    # Streams reset by the peer before they are answered, or for its errors. While they are more than half of
    # those that it opened, too, new ones are refused.
    resets: int = 200
    empty_data_in_a_row: int = 100
    # A second, on average; each stream and DATA frame sent allows one more PING (for clients that measure
    # the bandwidth so), two WINDOW_UPDATEs and ten.
    pings_per_second: int = 20
    settings_per_second: int = 20
    window_updates_per_second: int = 100
    # PRIORITY, acknowledged PINGs, frames of unknown types, resets of streams that are gone; besides two for
    # each stream.
    idle_per_second: int = 100
    # PING and SETTINGS that are acknowledged in output that is not taken yet.
    unsent_acks: int = 100
    # DATA in output that is not taken yet; more waits in the streams' queues.
    output_bytes: int = 2**20


class Recent:
    """Counts of the last two periods, on which budgets depend."""

    __slots__ = (
        "_before",
        "data_sent",
        "first_stream_id",
        "idle",
        "opened",
        "pings",
        "resets",
        "settings",
        "updates",
    )

    def __init__(self) -> None:
        self.opened = self.resets = self.pings = self.settings = self.updates = 0
        self.data_sent = self.idle = 0
        # The first stream of these periods: the reset of an older one is no attack, as they are few.
        self.first_stream_id = 0
        self._before = (0, 0, 0, 0, 0, 0, 0, 0)

    def next_period(self, next_stream_id: int, skipped: bool) -> None:
        """Forgets what was counted before the current period, and that, too, if a period was `skipped`."""
        opened, resets, pings, settings, updates, data_sent, idle, first = self._before
        self._before = now = (
            self.opened - opened,
            self.resets - resets,
            self.pings - pings,
            self.settings - settings,
            self.updates - updates,
            self.data_sent - data_sent,
            self.idle - idle,
            next_stream_id,
        )
        self.first_stream_id = first
        if skipped:
            now = self._before = (0, 0, 0, 0, 0, 0, 0, next_stream_id)
            self.first_stream_id = next_stream_id
        (
            self.opened,
            self.resets,
            self.pings,
            self.settings,
            self.updates,
            self.data_sent,
            self.idle,
            _,
        ) = now

    def resets_most(self) -> bool:
        """True if the peer resets more than half of the streams that it opens."""
        return self.resets * 2 > self.opened

    def check_idle(self, limits: Http2Limits) -> None:
        """Raises where there are too many frames that bring nothing."""
        if self.idle > limits.idle_per_second * PERIODS_S + 2 * self.opened:
            raise too_much(Reason.IDLE_FRAMES, "too many frames that bring nothing")

    def check_pings(self, limits: Http2Limits) -> None:
        """Raises where there are more PINGs than traffic explains."""
        if self.pings > limits.pings_per_second * PERIODS_S + self.opened + self.data_sent:
            raise too_much(Reason.PINGS, "too many PING frames")

    def check_settings(self, limits: Http2Limits) -> None:
        """Raises where SETTINGS are too frequent."""
        if self.settings > limits.settings_per_second * PERIODS_S:
            raise too_much(Reason.SETTINGS, "too many SETTINGS frames")

    def check_updates(self, limits: Http2Limits) -> None:
        """Raises where there are more WINDOW_UPDATEs than data sent explains."""
        allowed = limits.window_updates_per_second * PERIODS_S + 2 * self.opened + 10 * self.data_sent
        if self.updates > allowed:
            raise too_much(Reason.WINDOW_UPDATES, "too many WINDOW_UPDATE frames")


def too_much(reason: Reason, text: str) -> ConnectionViolation:
    """The connection error of a passed limit."""
    return ConnectionViolation(ErrorCode.ENHANCE_YOUR_CALM, reason, text)
