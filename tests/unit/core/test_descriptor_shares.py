"""How many connections a port may hold, by the process's limit of descriptors."""

from __future__ import annotations

import resource

import pytest

from conch.core.process_setup import GRPC_SHARES, HTTP_SHARES, most_connections, raise_descriptor_limit


class Limits:
    """Stands in for the limits of this process, which a test must not change."""

    def __init__(self, soft: int, hard: int) -> None:
        self.now = (soft, hard)

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.now

    def set(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        self.now = limits


@pytest.mark.parametrize(
    ("soft", "hard", "after", "connections"),
    [
        (1024, 4096, 4096, 1536),
        (1024, 1 << 20, 65536, 24576),
        (1 << 20, 1 << 20, 1 << 20, 24576),
        (20, 20, 20, 16),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 24576),
    ],
)
def test_the_limit_is_raised_and_shared_out(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int, connections: int
) -> None:
    limits = Limits(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    assert raise_descriptor_limit() == after
    assert limits.now == (after, hard)
    assert most_connections(GRPC_SHARES) == connections


def test_a_quarter_is_left_to_everything_else() -> None:
    assert GRPC_SHARES + HTTP_SHARES <= 6
