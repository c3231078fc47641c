"""Reads a pickle and computes its predictions: ``pickle_job.py FD JOB``, within `sandbox`.

Runs in whatever environment has the model's packages, without conch. JOB is a JSON text: ``action``,
``source``, ``data`` and ``rows``. The answer goes to the file descriptor FD: a line of JSON, then the bytes
of the model's file. The action ``versions`` unpickles nothing: it looks for versions in the bytes of the
pickle. The action ``convert`` unpickles, which runs whatever code the pickle has.

Its answer has ``kind`` (the file's type), ``about``, ``warnings``, ``columns`` (names or null), ``rows`` (for
each column its ``type`` and values), ``made`` (how the rows were made) and ``predictions`` by output.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import math
import os
import pickle
import re
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Array = Any
Columns = dict[str, list[Any]]

FAILED = 1
_VERSION = re.compile(
    rb"_sklearn_version"
    rb"(?:(?:\x94|q.|r.{4})?(?:\x8c(?P<short>.)|X(?P<long>.)\0\0\0)(?P<text>.{1,40})"
    rb"|\np\d+\nV(?P<line>[^\n]{1,40})\n)",
    re.DOTALL,
)
"""The key, and the text that follows it in pickles of protocol 2 and later, or of 0 and 1."""
_CHUNK = 1 << 20
_OVERLAP = 128
_OUTPUTS = ("predict", "predict_proba", "transform")
_MOST_COLUMNS = 1 << 16
_TRUTHS = {"true": True, "false": False, "True": True, "False": False, "1": True, "0": False}


class RefusedError(Exception):
    """The pickle holds what is not converted; the text says what."""


def main(arguments: Sequence[str]) -> int:
    """Runs the job; returns the exit code."""
    own = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if path != own]  # its modules must not hide a package
    job = json.loads(arguments[1])
    content = b""
    try:
        if job["action"] == "versions":
            found: dict[str, Any] = {"sklearn": sklearn_version(job["source"])}
        else:
            found, content = convert(job)
    except RefusedError as error:
        found = {"refused": str(error)}
    except PermissionError as error:
        found = {
            "refused": f"it does what the sandbox refuses, such as to write or to use a network: {error}"
        }
    except Exception as error:  # of the pickle, which may raise anything
        traceback.print_exc()
        found = {"refused": f"{type(error).__name__}: {error}"}
    with open(int(arguments[0]), "wb") as answer:
        answer.write(json.dumps(found).encode() + b"\n")
        answer.write(content)
    return FAILED if "refused" in found else 0


def sklearn_version(source: str) -> str:
    """The version of scikit-learn that a pickle names; empty if it names none."""
    before = b""
    try:
        for chunk in _chunks(source):
            if found := _VERSION.search(before + chunk):
                size = (found["short"] or found["long"] or b"\0")[0]
                return (found["line"] or found["text"][:size]).decode(errors="replace")
            before = (before + chunk)[-_OVERLAP:]
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise RefusedError(f"the file can't be decompressed: {error}") from error
    return ""


def _chunks(source: str) -> Iterator[bytes]:
    """Bytes of a pickle, which joblib may have compressed."""
    with open(source, "rb") as file:
        head = file.read(6)
    opens: tuple[tuple[bytes, Callable[[str], Any]], ...] = (
        (b"\x1f\x8b", gzip.open),
        (b"BZ", bz2.open),
        (b"\xfd7zXZ", lzma.open),
        (b"\x5d\x00", lzma.open),
    )
    for magic, opened in opens:
        if head.startswith(magic):
            with opened(source) as file:
                yield from iter(lambda: file.read(_CHUNK), b"")
            return
    inflate = zlib.decompressobj() if head[:1] == b"\x78" else None
    with open(source, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK // 8), b""):
            yield inflate.decompress(chunk) if inflate else chunk


def convert(job: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Unpickles a model; returns what to tell of it, and the bytes of its file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _unpickled(job["source"])
    said = sorted({str(each.message).splitlines()[0] for each in caught})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, content, facts = _converted(model)
        names = _names(model, kind)
        known = _known(model, names, kind)
        if job["data"]:
            rows, made = _given(job["data"], names, known, job["rows"]), ""
            if kind == "catboost":
                rows = {
                    name: _bools(values) if known[name] else _floats(values) for name, values in rows.items()
                }
        else:
            rows, made = _made(known, job["rows"])
            if kind == "catboost" and any(known.values()):
                made += "; its categories are unknown, as CatBoost's files do not have them"
        rows, dropped = _without_null_texts(rows, known)
        try:
            predictions = _predictions(model, kind, names, rows)
        except ValueError:
            if job["data"]:
                raise
            # Such as of logarithms, and of counts.
            rows = {name: _positive(values) for name, values in rows.items()}
            made = f"{made}, all positive"
            predictions = _predictions(model, kind, names, rows)
    return {
        "kind": kind,
        "about": f"{type(model).__name__} of {_package(model)}",
        "warnings": said,
        "columns": names,
        "rows": {name: {"type": _type(values), "values": _plain(values)} for name, values in rows.items()},
        "made": made,
        "dropped": dropped,
        "predictions": predictions,
        **facts,
    }, content


def _unpickled(source: str) -> Any:
    try:
        import joblib
    except ModuleNotFoundError:
        with open(source, "rb") as file:
            return pickle.load(file)
    return joblib.load(source)


def _package(model: Any) -> str:
    from importlib.metadata import packages_distributions, version

    module = type(model).__module__.partition(".")[0]
    names = packages_distributions().get(module, [])
    return f"{module} {version(names[0])}" if names else module


def _converted(model: Any) -> tuple[str, bytes, dict[str, Any]]:
    """The file of a model: its type, bytes, and facts for the config."""
    module = type(model).__module__.partition(".")[0]
    if module == "xgboost":
        return _xgboost(model)
    if module == "lightgbm":
        return _lightgbm(model)
    if module == "catboost":
        return _catboost(model)
    if not any(hasattr(model, name) for name in _OUTPUTS):
        raise RefusedError(
            f"the pickle holds a {type(model).__module__}.{type(model).__name__}, which has no 'predict', "
            f"'predict_proba' or 'transform'"
        )
    import skops.io

    try:
        content = skops.io.dumps(model)
    except Exception as error:  # of skops, such as its UnsupportedTypeException
        raise RefusedError(f"skops can't write it: {error}") from error
    return "sklearn", content, {"types": list(skops.io.get_untrusted_types(data=content))}


def _xgboost(model: Any) -> tuple[str, bytes, dict[str, Any]]:
    booster = model.get_booster() if hasattr(model, "get_booster") else model
    missing = getattr(model, "missing", math.nan)
    if missing is not None and not math.isnan(missing):
        raise RefusedError(f"its missing values are {missing}, not NaN, which XGBoost's files do not keep")
    if "c" in (booster.feature_types or ()):
        raise RefusedError(
            "it was trained on categories of a DataFrame, which rows without names have as codes: save it "
            "with get_booster().save_model('model.ubj'), and send rows with names and categories"
        )
    best = booster.attr("best_iteration") if booster is not model else None
    facts = {"best": best is not None, "classes": _classes(model), "raw": booster is model}
    return "xgboost", bytes(booster.save_raw("ubj")), facts


def _lightgbm(model: Any) -> tuple[str, bytes, dict[str, Any]]:
    booster = getattr(model, "booster_", model)
    if booster.pandas_categorical:
        raise RefusedError(
            "it was trained on categories of a DataFrame, which rows without names have as codes: save it "
            "with booster_.save_model('model.txt'), and send rows with names and categories"
        )
    facts = {"classes": _classes(model), "raw": booster is model}
    return "lightgbm", booster.model_to_string().encode(), facts


def _catboost(model: Any) -> tuple[str, bytes, dict[str, Any]]:
    if not model.is_fitted():
        raise RefusedError("the model is not fitted")
    if model.get_text_feature_indices() or model.get_embedding_feature_indices():
        raise RefusedError(
            "it has text or embedding features, and what CatBoost writes of such a pickle ends the process "
            "that opens it: save it with save_model('model.cbm') where it is trained"
        )
    # `save_model` only writes to paths, which no process of the sandbox may.
    content = model.__getstate__()["__model"]
    type(model)().load_model(blob=content)  # a file that crashes CatBoost does so here, not in the server
    return "catboost", content, {"raw": type(model).__name__ == "CatBoost"}


def _classes(model: Any) -> list[Any] | None:
    classes = getattr(model, "classes_", None)
    return None if classes is None else np.asarray(classes).tolist()


def _names(model: Any, kind: str) -> list[str] | None:
    """Names of the training's columns; None if it had none."""
    if kind == "catboost":
        return [str(each) for each in model.feature_names_]
    if kind in ("xgboost", "lightgbm"):
        booster = model.get_booster() if hasattr(model, "get_booster") else getattr(model, "booster_", model)
        names = booster.feature_names if kind == "xgboost" else booster.feature_name()
        return None if names is None else [str(each) for each in names]
    names = getattr(model, "feature_names_in_", None)
    return None if names is None else [str(each) for each in names]


def _known(model: Any, names: list[str] | None, kind: str) -> dict[str, list[Any]]:
    """Values that each column may have, as far as what is fitted knows them."""
    if kind == "catboost":
        texts = {*model.get_cat_feature_indices(), *model.get_text_feature_indices()}
        return {name: ["1", "a"] if at in texts else [] for at, name in enumerate(names or ())}
    features = getattr(model, "n_features_in_", None)
    if names is None and features is None:
        if kind in ("xgboost", "lightgbm"):
            features = model.num_features() if kind == "xgboost" else model.num_feature()
        else:
            return {"text": _words(model)}
    names = names or [f"x{at}" for at in range(int(features or 0))]
    known: dict[str, list[Any]] = {name: [] for name in names}
    for name, values in _learned(model, names):
        known[name] = max(known.get(name, []), values, key=len)  # an imputer knows one
    return known


def _learned(part: Any, names: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Values of columns that a fitted part has seen."""
    if hasattr(part, "transformers_"):
        for _, each, columns in part.transformers_:
            if each != "drop":
                yield from _learned(each, _selected(columns, names))
    elif hasattr(part, "transformer_list"):
        for _, each in part.transformer_list:
            yield from _learned(each, names)
    elif hasattr(part, "steps"):
        for _, step in part.steps:
            yield from _learned(step, names)
            if not hasattr(step, "statistics_"):  # only imputers keep the columns
                break
    elif hasattr(part, "build_analyzer"):
        yield from ((name, _words(part)) for name in names)
    elif hasattr(part, "is_categorical_"):
        yield from _learned(getattr(part, "_preprocessor", None), names)
    elif hasattr(part, "categories_"):
        yield from ((name, list(values)) for name, values in zip(names, part.categories_, strict=False))
    else:
        yield from _learned_numbers(part, names)


def _learned_numbers(part: Any, names: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    if hasattr(part, "tree_") or hasattr(part, "estimators_"):
        thresholds: dict[int, list[float]] = {}
        for tree in np.ravel(np.asarray(getattr(part, "estimators_", [part]), object)):
            nodes = getattr(tree, "tree_", None)
            for at, value in zip(nodes.feature, nodes.threshold, strict=True) if nodes is not None else ():
                thresholds.setdefault(int(at), []).append(float(value))
        yield from ((names[at], _around(found)) for at, found in thresholds.items() if 0 <= at < len(names))
        return
    for center, spread in (("data_min_", "data_range_"), ("mean_", "scale_"), ("center_", "scale_")):
        centers, spreads = (np.asarray(getattr(part, each, ()), object) for each in (center, spread))
        if centers.shape == spreads.shape == (len(names),):
            pairs = zip(names, centers.tolist(), spreads.tolist(), strict=True)
            yield from ((name, [float(low), float(low + size)]) for name, low, size in pairs)
            return
    statistics = np.asarray(getattr(part, "statistics_", ()))
    if statistics.dtype.kind == "O" and len(statistics) == len(names):
        yield from ((name, [each]) for name, each in zip(names, statistics.tolist(), strict=True))


def _around(thresholds: list[float]) -> list[float]:
    """Values on both sides of all thresholds."""
    low, high = min(thresholds), max(thresholds)
    margin = (high - low) / 4 or abs(high) / 4 or 1.0
    return [low - margin, high + margin]


def _words(part: Any) -> list[str]:
    """Texts of a vectorizer's vocabulary; of any part without one a sentence."""
    for _, step in getattr(part, "steps", ()):
        if hasattr(step, "build_analyzer"):
            part = step
            break
    if hasattr(part, "classes_") and not hasattr(part, "steps"):
        return list(np.asarray(part.classes_).tolist())  # a label's encoder
    words = sorted(getattr(part, "vocabulary_", ()))[:200] or ["a", "text", "of", "five", "words"]
    return [" ".join(words[at : at + 5]) for at in range(0, len(words), 3)]


def _selected(columns: Any, names: Sequence[str]) -> list[str]:
    if isinstance(columns, str):
        return [columns]
    if isinstance(columns, slice) and isinstance(columns.start or columns.stop, str):
        start, stop = columns.start, columns.stop
        return list(names[names.index(start) if start else 0 : names.index(stop) + 1 if stop else None])
    if not isinstance(columns, slice) and all(isinstance(each, str) for each in columns):
        return [str(each) for each in columns]
    return [str(each) for each in np.atleast_1d(np.asarray(names, object)[columns])]


def _made(known: Mapping[str, list[Any]], count: int) -> tuple[Columns, str]:
    """Rows of values that the model knows; normal numbers where it says nothing about a column."""
    random = np.random.default_rng(0)
    rows: Columns = {}
    unknown = []
    for name, values in known.items():
        present = [each for each in values if not _is_null(each)]
        if not present:
            unknown.append(name)
            rows[name] = random.normal(size=count).tolist()
        elif all(isinstance(each, float) for each in present) and len(present) == 2:
            rows[name] = random.uniform(min(present), max(present), count).tolist()
        else:
            rows[name] = [_python(present[at]) for at in random.integers(0, len(present), count)]
    of = ", ".join(unknown[:8]) + (", ..." if len(unknown) > 8 else "")
    return rows, f"normal numbers for {of}" if unknown else "values that the model knows"


def _given(path: str, names: list[str] | None, known: Mapping[str, list[Any]], count: int) -> Columns:
    """The user's rows, typed by what the model knows of its columns."""
    table = _read(path, count)
    wanted = names or list(known)
    if names is None and len(table) >= len(wanted):
        table = dict(zip(wanted, table.values(), strict=False))
    if missing := [name for name in wanted if name not in table]:
        raise RefusedError(f"--data has no column {', '.join(missing)}; its columns are {', '.join(table)}")
    return {name: _typed(name, table[name], known[name]) for name in wanted}


def _read(path: str, count: int) -> Columns:
    if path.endswith(".csv"):
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            lines = [line for _, line in zip(range(count), reader, strict=False)]
        if wrong := [at for at, line in enumerate(lines) if len(line) != len(header)]:
            raise RefusedError(
                f"--data has {len(lines[wrong[0]])} fields in row {wrong[0]}, not {len(header)}"
            )
        return {name: [line[at] for line in lines] for at, name in enumerate(header)}
    if path.endswith((".json", ".jsonl")):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        records = (
            json.loads(text) if path.endswith(".json") else [json.loads(each) for each in text.splitlines()]
        )
        if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
            raise RefusedError("--data is no JSON list of objects, one for each row")
        keys = dict.fromkeys(key for each in records[:count] for key in each)
        return {key: [each.get(key) for each in records[:count]] for key in keys}
    if path.endswith(".parquet"):
        import pandas as pd

        frame = pd.read_parquet(path)[:count]
        return {str(name): frame[name].tolist() for name in frame}
    raise RefusedError("--data must end with .csv, .json, .jsonl or .parquet")


def _typed(name: str, values: list[Any], known: Sequence[Any]) -> list[Any]:
    """A column's values; those of a CSV are texts, which stay texts where the model knows texts."""
    like = next((each for each in known if not _is_null(each)), 0.0)
    for value in values:
        if isinstance(value, (list, dict)):
            raise RefusedError(f"--data has {value!r} in column {name}, where one value belongs")
        if isinstance(like, str) and not isinstance(value, str) and not _is_null(value):
            raise RefusedError(f"--data has {value!r} in column {name}, and the model knows texts")
    if isinstance(like, str):
        return [None if each == "" or _is_null(each) else each for each in values]
    # As pandas reads a column of nothing else.
    are_bools = isinstance(like, (bool, np.bool_)) or {*values} <= {"True", "False", "true", "false"}
    return [_number(name, each, are_bools) for each in values]


def _bools(values: list[Any]) -> list[Any]:
    """Texts of a CSV as bools, if all are."""
    return [each == "True" for each in values] if {*values} <= {"True", "False"} else values


def _floats(values: list[Any]) -> list[Any]:
    """Whole numbers as floats: of a column of floats, the rows of a sample may all be whole."""
    return [float(each) if type(each) is int else each for each in values]


def _positive(values: list[Any]) -> list[Any]:
    return [abs(each) + 0.01 if isinstance(each, float) else each for each in values]


def _without_null_texts(rows: Columns, known: Mapping[str, list[Any]]) -> tuple[Columns, int]:
    """Rows without those in which a text is missing, which no request can hold; and the number of these."""
    texts = [values for name, values in rows.items() if any(isinstance(each, str) for each in known[name])]
    count = len(next(iter(rows.values())))
    kept = [at for at in range(count) if all(values[at] is not None for values in texts)]
    if not kept:
        raise RefusedError("no row has a value in each column of texts")
    return {name: [values[at] for at in kept] for name, values in rows.items()}, count - len(kept)


def _number(name: str, value: Any, is_bool: bool) -> Any:
    if _is_null(value) or value == "":
        return math.nan
    if not isinstance(value, str):
        return _python(value)
    if is_bool and value in _TRUTHS:
        return _TRUTHS[value]
    try:
        return int(value) if re.fullmatch(r"-?\d{1,15}", value) else float(value)
    except ValueError:
        raise RefusedError(f"--data has {value!r} in column {name}, where the model takes numbers") from None


def _predictions(model: Any, kind: str, names: list[str] | None, rows: Columns) -> dict[str, Any]:
    given = _input(model, kind, names, rows)
    found: dict[str, Any] = {}
    for output in _OUTPUTS:
        if not hasattr(model, output):
            continue
        try:
            result = getattr(model, output)(given)
        except Exception:  # such as probabilities of a model trained without them
            if output == "predict" or not found:
                raise
            continue
        parts = {f"{output}_{at}": each for at, each in enumerate(result)} if isinstance(result, list) else {}
        for name, part in (parts or {output: result}).items():
            if hasattr(part, "toarray") and part.shape[1] > _MOST_COLUMNS:
                continue  # nor does the server send it
            array = np.asarray(part.toarray() if hasattr(part, "toarray") else part)
            found[name] = {"values": _plain(array.reshape(-1).tolist()), "shape": array.shape}
    return found


def _input(model: Any, kind: str, names: list[str] | None, rows: Columns) -> Any:
    """Rows as a user gives them to the model."""
    if kind == "xgboost" and not hasattr(model, "get_booster"):
        import xgboost

        return xgboost.DMatrix(_matrix(rows), feature_names=names)
    if kind in ("xgboost", "lightgbm"):
        return _matrix(rows)
    if names is not None:
        import pandas as pd

        return pd.DataFrame({name: pd.Series(values, dtype=_dtype(values)) for name, values in rows.items()})
    if getattr(model, "n_features_in_", None) is None:
        return next(iter(rows.values()))
    if any(_type(values) == "text" for values in rows.values()):
        return np.array([list(row) for row in zip(*rows.values(), strict=True)], object)
    return _matrix(rows)


def _matrix(rows: Columns) -> Array:
    return np.column_stack([np.asarray(values, np.float64) for values in rows.values()])


def _dtype(values: list[Any]) -> Any:
    return {"text": object, "bool": bool, "integer": np.int64}.get(_type(values), np.float64)


def _type(values: Sequence[Any]) -> str:
    if any(isinstance(each, str) for each in values):
        return "text"
    if all(isinstance(each, bool) for each in values):
        return "bool"
    return (
        "integer"
        if all(isinstance(each, int) and not isinstance(each, bool) for each in values)
        else "number"
    )


def _plain(values: Sequence[Any]) -> list[Any]:
    """Values for JSON, which has no infinity and no NaN."""
    return [
        None if _is_null(each) else str(each) if isinstance(each, float) and math.isinf(each) else each
        for each in (_python(each) for each in values)
    ]


def _python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_null(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, (float, np.floating)) and math.isnan(value))
        or str(value) == "<NA>"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
