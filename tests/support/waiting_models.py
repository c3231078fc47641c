"""A model that loads until a file is there."""

from __future__ import annotations

WAITING = """
import time
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        Path({running!r}).touch()
        while not Path({go!r}).exists():
            time.sleep(0.01)

    def execute(self, requests):
        return []
"""
