"""Repositories and agents made for one test."""

from __future__ import annotations

from tests.support.sites import site

__all__ = ["site"]
