"""Tunes the recommended candidate with `conch tune`, and applies what is surely better to its repository."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.core.errors import ConchError
from conch_tools.optimize.model_signature import ModelSignature
from conch_tools.optimize.options import OptimizeOptions
from conch_tools.optimize.original import Original
from conch_tools.optimize.result_repository import ResultRepository
from conch_tools.optimize.sample_data import as_datatype, tensor_data
from conch_tools.perf.load.coordinator import LoadError
from conch_tools.perf.load.input_data import DataError
from conch_tools.perf.perf_settings import SettingError
from conch_tools.server_api import AskError
from conch_tools.tune.apply import apply_winner
from conch_tools.tune.trial_server import TrialError
from conch_tools.tune.tune_file import FormatError, TuneFile
from conch_tools.tune.tune_report import measurement_text, write_reports
from conch_tools.tune.tuner import NotTunedError, TuneSettings, run_tune

_ROWS = 64
_LONG_S, _WINDOW_S, _SHORT_WINDOW_S, _PAIRS = 60, 5, 2, 5


def tune_winner(
    repository: ResultRepository,
    folder: Path,
    original: Original,
    signature: ModelSignature,
    options: OptimizeOptions,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Searches settings of a model with the samples as its load, or continues the folder's search.

    Args:
        repository: Gets the winner's config.
        folder: Gets the reports.
        original: It has the samples.
        signature: Signature of the model.
        options: With the time of the search, and whether it begins again.
        progress: Called with a line for each measurement.

    Returns:
        For the report: ``sentence``, ``gain``, ``winner``, ``diff`` and ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "samples.json"
    data.write_text(json.dumps({"data": _entries(original, signature)}))
    settings = TuneSettings(
        repository=repository.path,
        model=repository.model,
        folder=folder,
        budget_s=options.tune_s,
        window_s=_WINDOW_S if options.tune_s >= _LONG_S else _SHORT_WINDOW_S,
        pairs=_PAIRS,
        data=[data],
        restart=options.restart,
    )
    try:
        file = _tuned(settings, progress)
    except (ConchError, AskError, DataError, LoadError, NotTunedError, SettingError, TrialError) as error:
        text = error.message if isinstance(error, ConchError) else str(error)
        sentence = f"Not tuned: {text.rstrip('.')}."
        return {"sentence": sentence, "gain": None, "winner": None, "diff": "", "folder": str(folder)}
    write_reports(file, folder)
    if file.result["winner"] is not None:
        apply_winner(file, repository.path)
    shown = {name: file.result[name] for name in ("sentence", "gain", "winner", "diff")}
    return {**shown, "folder": str(folder)}


def _tuned(settings: TuneSettings, progress: Callable[[str], None]) -> TuneFile:
    def done(one: Any) -> None:
        progress(f"tune: {measurement_text(one)}")

    try:
        return run_tune(settings, done)
    except FormatError as error:
        # The folder is this program's own: a search of other settings is not continued.
        progress(f"tune: begins again: {error}")
        return run_tune(replace(settings, restart=True), done)


def _entries(original: Original, signature: ModelSignature) -> list[dict[str, Any]]:
    """Samples as requests of one row, in the form of Triton's load generator."""
    with np.load(original.samples_file, allow_pickle=False) as arrays:
        rows = {
            each.name: as_datatype(arrays[each.original][:_ROWS], each.datatype) for each in signature.inputs
        }
    count = len(next(iter(rows.values())))
    return [{name: _value(array[row]) for name, array in rows.items()} for row in range(count)]


def _value(array: npt.NDArray[Any]) -> dict[str, Any]:
    return {"content": {"b64": base64.b64encode(tensor_data(array)).decode()}, "shape": list(array.shape)}
