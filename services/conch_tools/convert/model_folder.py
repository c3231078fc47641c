"""Writes the folder of a converted model: its file, config and labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILES = {
    "sklearn": "model.skops",
    "xgboost": "model.ubj",
    "lightgbm": "model.txt",
    "catboost": "model.cbm",
}
"""File of each backend."""

_LABELS = "labels.txt"
_OF_TYPES = {"bool": "TYPE_BOOL", "integer": "TYPE_INT64", "text": "TYPE_STRING"}


def write_model(
    folder: Path, content: Path, facts: Mapping[str, Any], trusted: Sequence[str], has_data: bool
) -> None:
    """Writes a model directory with version 1, and moves the model's file into it."""
    backend = facts["kind"]
    version = folder / "1"
    version.mkdir(parents=True)
    shutil.move(content, version / FILES[backend])
    lines = [f'backend: "{backend}"']
    if backend == "catboost" and has_data:
        lines += _columns(facts["rows"])
    if facts.get("raw") and backend == "catboost":
        lines += ['output { name: "margin" }']
    if labels := _labels(facts):
        (folder / _LABELS).write_text("".join(f"{each}\n" for each in labels))
        lines += [
            'output { name: "predict" }',
            f'output {{ name: "predict_proba" label_filename: "{_LABELS}" }}',
        ]
    parameters = {}
    if trusted:
        parameters["CONCH_TRUSTED_TYPES"] = ", ".join(trusted)
    if facts.get("best"):
        parameters["CONCH_BEST_ITERATION"] = "true"
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}'
        for key, value in parameters.items()
    ]
    (folder / "config.pbtxt").write_text("".join(f"{line}\n" for line in lines))


def class_note(facts: Mapping[str, Any]) -> str:
    """A sentence about classes that the served model answers by number; empty if there are none."""
    classes = facts.get("classes")
    if not classes or classes == list(range(len(classes))):
        return ""
    of = ", ".join(f"{at} for {each!r}" for at, each in enumerate(classes[:8]))
    return f"predict answers the number of the class: {of}{', ...' if len(classes) > 8 else ''}"


def _labels(facts: Mapping[str, Any]) -> list[str]:
    """Labels of classes of texts, whose file has numbers alone."""
    classes = facts.get("classes") or []
    texts = all(isinstance(each, str) and "\n" not in each for each in classes)
    return classes if texts else []


def _columns(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Inputs with the types of the user's rows, as CatBoost's file does not have those of categories."""
    return [
        f"input {{ name: {json.dumps(name)} data_type: {_OF_TYPES.get(column['type'], 'TYPE_FP64')} }}"
        for name, column in rows.items()
    ]
