"""Names and categories of the features that a model file has, as entries of the parameter `CONCH_COLUMNS`.

Engines take features by place, so a table's columns need them. Files whose names are missing, made up by the
library, or contradictory give no entries. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch_frames.column_rules import COLUMNS_PARAMETER

Columns = tuple[dict[str, Any], ...]
"""An entry for each feature, in the model's order; empty if the names are unknown."""

_MADE_UP = re.compile(r"Column_\d+|f\d+")
_MOST_CATEGORIES = 1000
"""Largest number of a column's categories in a config; the library checks more alone."""


def add_columns(config: dict[str, Any], columns: Columns) -> None:
    """Completes a config whose input has all features, unless it names them itself."""
    if columns and COLUMNS_PARAMETER not in config.get("parameters", {}):
        entries = [entry["name"] if len(entry) == 1 else entry for entry in columns]
        text = json.dumps(entries, ensure_ascii=False)
        config.setdefault("parameters", {})[COLUMNS_PARAMETER] = {"string_value": text}


def named_columns(names: Sequence[Any], features: int) -> Columns:
    """Entries of features with names only."""
    texts = [each for each in names if isinstance(each, str) and each]
    if len(texts) != features or len(set(texts)) != features or len(texts) != len(names):
        return ()
    return () if all(map(_MADE_UP.fullmatch, texts)) else tuple({"name": each} for each in texts)


def xgboost_columns(document: Mapping[str, Any], features: int, model: str) -> Columns:
    """Entries of a checked model of XGBoost; rows hold the numbers of categories.

    Raises:
        InvalidArgumentError: The categories of a column can't be known.
    """
    learner = document["learner"]
    names = learner.get("feature_names")
    entries = named_columns(list(names) if isinstance(names, Sequence) else [], features)
    booster = learner["gradient_booster"]
    booster = booster.get("gbtree", booster)  # of dart
    encoders = (booster.get("model", {}).get("cats") or {}).get("enc") or []
    for entry, encoder in zip(entries, encoders, strict=False):
        values = [each.item() if hasattr(each, "item") else each for each in encoder.get("values", ())]
        if "offsets" in encoder and len(encoder["offsets"]) <= _MOST_CATEGORIES + 1:
            content = bytes(each & 0xFF for each in values)
            if not content.isascii():
                # Of a DataFrame of pandas XGBoost 3.2 writes offsets in characters, and values in bytes, cut
                # at the last offset; of polars and Arrow all in bytes. Both may read as texts.
                raise InvalidArgumentError(
                    f"unable to load model '{model}': column '{entry['name']}' has categories with letters "
                    f"beyond ASCII, which XGBoost cuts and shifts where the training had a DataFrame of "
                    f"pandas, and the file does not say what it had: list the model's columns in parameter "
                    f"'{COLUMNS_PARAMETER}', this one with the categories of the training in their order, as "
                    f'{{"name": "{entry["name"]}", "categories": ["...", "..."], "codes": true}}'
                )
            ends = [int(each) for each in encoder["offsets"]]
            values = [content[start:end].decode() for start, end in pairwise(ends)]
        categories = usable_categories(values)
        if categories:
            entry |= {"categories": categories, "codes": True}
    return entries


def lightgbm_columns(fields: Mapping[bytes, bytes], end: bytes, features: int) -> Columns:
    """Entries of a LightGBM model, which has written ``_`` for spaces in names.

    Args:
        fields: The header.
        end: The text behind the trees, with parameters and categories.
        features: Number of features.
    """
    names = fields.get(b"feature_names", b"").decode(errors="replace").split(" ")
    entries = named_columns(names, features)
    for entry in entries:
        if "_" in entry["name"]:
            entry["spaces"] = True
    places = re.search(rb"^\[categorical_feature: ([\d,]+)\]$", end, re.MULTILINE)
    written = re.search(rb"^pandas_categorical:(.*)$", end, re.MULTILINE)
    if not entries or places is None or written is None:
        return entries
    try:
        columns = json.loads(written[1])
    except ValueError:
        return ()
    numbers = sorted({int(each) for each in places[1].split(b",") if each})
    if not columns:
        return entries  # the training had numbers
    if not isinstance(columns, list) or len(columns) != len(numbers) or numbers[-1] >= features:
        return ()
    for number, categories in zip(numbers, columns, strict=True):
        usable = usable_categories(categories)
        if not usable:
            return ()
        entries[number].update({"categories": usable, "codes": True})
    return entries


def usable_categories(categories: Any) -> list[Any]:
    """Categories that a config can list; none of them if there are too many, or some are of another type."""
    if not isinstance(categories, list) or not 0 < len(categories) <= _MOST_CATEGORIES:
        return []
    kinds = {type(each) for each in categories}
    return categories if len(kinds) == 1 and kinds <= {str, int, float, bool} else []
