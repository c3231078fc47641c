"""Has conch serve a candidate in a process of its own, which answers the samples or is measured."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conch_tools.optimize.model_signature import ModelSignature
from conch_tools.optimize.original import Original
from conch_tools.optimize.step_processes import ProcessFailedError, run_process
from conch_tools.optimize.step_runner import LOG

_FEW_ROWS = 8


class CandidateServing:
    """Serves candidates, each from its folder, which is a model's directory too."""

    def __init__(self, original: Original, timeout_s: float) -> None:
        self._original, self._timeout_s = original, timeout_s

    def answer(self, folder: Path, signature: ModelSignature) -> dict[str, Any]:
        """Saves ``answers-SIZE.npz`` for each batch size; returns ``load_error``, or ``errors`` by size."""
        return self._serve(folder, signature, 0.0)

    def measure(self, folder: Path, signature: ModelSignature, seconds: float) -> dict[str, Any]:
        """Measures each batch size; returns ``profile``, ``host_bytes`` and ``load_s``."""
        return self._serve(folder, signature, seconds)

    def _serve(self, folder: Path, signature: ModelSignature, seconds: float) -> dict[str, Any]:
        original = self._original
        job = {
            "parent": os.getpid(),
            "repository": str(folder.parent),
            "model": folder.name,
            "samples": str(original.samples_file),
            "inputs": [asdict(each) for each in signature.inputs],
            "batching": original.signature.batching,
            "largest": original.batch or 1,
            "sizes": original.sizes,
            "few_rows": _FEW_ROWS,
            "seconds": seconds,
            "timeout_s": self._timeout_s,
        }
        file, answers = folder / "serving.json", folder / "answers.json"
        file.write_text(json.dumps(job))
        command = [sys.executable, "-P", "-m", "conch_tools.optimize.serving_process", str(file)]
        try:
            run_process(command, folder, dict(os.environ), folder / LOG, self._timeout_s)
        except ProcessFailedError as error:
            raise ProcessFailedError(f"conch fails while it serves the model: {error}") from error
        found: dict[str, Any] = json.loads(answers.read_text())
        for each in (file, answers):
            each.unlink()
        return found
