"""Repositories and agents made for one test."""

from __future__ import annotations

from tests.support.sites import no_threads_left, site

__all__ = ["no_threads_left", "site"]
