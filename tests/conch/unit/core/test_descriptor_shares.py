"""Shares of a port by the limits of the process: connections, memory, cores."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from conch.core.process_setup import (
    GRPC_SHARES,
    HTTP_SHARES,
    REGION_SHARES,
    SMALL_PORT_SHARES,
    memory_bytes,
    most_descriptors,
    raise_descriptor_limit,
    usable_cores,
)


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
        (1024, 4096, 4096, 1260),
        (1024, 1 << 20, 65536, 20460),
        (1 << 20, 1 << 20, 1 << 20, 20460),
        (20, 20, 20, 8),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 20460),
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
    assert most_descriptors(GRPC_SHARES) == connections


@pytest.mark.parametrize("limit", [256, 1024, 1 << 16])
def test_what_is_left_is_enough_for_the_server_and_some_workers(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", Limits(limit, limit).get)
    shares = [GRPC_SHARES, HTTP_SHARES, REGION_SHARES, *[SMALL_PORT_SHARES] * 3]
    assert limit - sum(map(most_descriptors, shares)) >= 64 + limit // 16


def test_memory_is_what_the_cgroup_allows(tmp_path: Path) -> None:
    machine = memory_bytes([])
    assert machine > 1 << 20
    limit, missing = tmp_path / "memory.max", tmp_path / "missing"
    for text, expected in (("max\n", machine), ("1048576\n", 1 << 20), (f"{1 << 63}\n", machine)):
        limit.write_text(text)
        assert memory_bytes([missing, limit]) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_what_the_cgroup_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores(tmp_path) == 64
    for quota, expected in (
        ("-1" if version == 1 else "max", 64),
        ("50000", 1),
        ("799999", 7),
        ("9900000", 64),
    ):
        if version == 1:
            (tmp_path / "cpu").mkdir(exist_ok=True)
            (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert usable_cores(tmp_path) == expected
