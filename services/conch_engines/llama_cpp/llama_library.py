"""The package xllamacpp, imported so that an abort of llama.cpp does not start a debugger."""

from __future__ import annotations

import os

os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import xllamacpp

__all__ = ["xllamacpp"]
