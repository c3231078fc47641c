"""Forests of decision trees in treelite, predicted by GTIL, its engine for CPUs.

`TreeliteEngine.open` loads a file of any type and checks the forest, so that no request makes GTIL follow a
wrong index. GTIL is called by its C interface: treelite's Python function builds a configuration in each
call, which takes longer than a small forest.

Owns: the engine its library, a `Forest` the C++ model, a `Gtil` its two configurations. Threads and locks:
none; any threads may predict at the same time, without the GIL.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.engine_text import engine_text, without_places
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.tensor import Array
from conch_engines.trees.checkpoint import MAJOR, check_checkpoint
from conch_engines.trees.feature_columns import Columns, named_columns, xgboost_columns
from conch_engines.trees.lightgbm_text import read_lightgbm
from conch_engines.trees.model_files import (
    CHECKPOINT,
    LIGHTGBM,
    XGBOOST,
    XGBOOST_JSON,
    XGBOOST_UBJ,
    DamagedError,
    open_estimator,
    unreadable,
)
from conch_engines.trees.xgboost_file import XgboostModel, choose_iterations, read_xgboost

log = logging.getLogger(__name__)

_CLASSIFIERS = (0, 2)
"""Task types of binary and of multi-class classifiers."""
_SMALL = 8192
"""Rows times trees, about a millisecond, up to which one thread is faster than waking others."""


class TreeliteEngine:
    """treelite, imported and ready."""

    def __init__(self) -> None:
        # Imported late: configs can be read without the engine.
        import treelite
        import treelite.sklearn
        from treelite.libpath import find_lib_path

        self._treelite: Any = treelite
        library = self._library = ctypes.CDLL(str(find_lib_path()[0]))
        pointer, size = ctypes.c_void_p, ctypes.c_uint64
        library.TreeliteGetLastError.restype = ctypes.c_char_p
        library.TreeliteGTILParseConfig.argtypes = [ctypes.c_char_p, pointer]
        library.TreeliteGTILDeleteConfig.argtypes = [pointer]
        library.TreeliteGTILPredict.argtypes = [pointer, pointer, ctypes.c_char_p, size, pointer, pointer]
        callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._on_message, self._on_warning = callback(self._keep_message), callback(_log_message)
        self._messages = threading.local()

    def open(
        self,
        path: Path,
        kind: str,
        model: str,
        allow_unknown_field: bool = False,
        best_iteration: bool | None = None,
    ) -> Forest:
        """Loads a model file and checks it.

        Args:
            path: The file.
            kind: Its type.
            model: The model's name.
            allow_unknown_field: True if unknown fields of XGBoost's formats are ignored.
            best_iteration: True if trees after the best iteration are left out; None for all, with a warning.
        """
        # treelite prints messages otherwise, and raises warnings where nothing can catch them. Each thread
        # has a registry of its own.
        self._library.TreeliteRegisterLogCallback(self._on_message)
        self._library.TreeliteRegisterWarningCallback(self._on_warning)
        self._messages.last = ""
        try:
            if kind in (XGBOOST_JSON, XGBOOST_UBJ):
                # From memory, as treelite leaves a file open that it can't parse.
                content = path.read_bytes()
                source = _read_xgboost(content, path, kind, model)
                iterations, warnings = choose_iterations(source, best_iteration, path, model)
                if iterations:
                    content, kind = source.best_as_json(), XGBOOST_JSON
                frontend = self._treelite.frontend
                parse = frontend.from_xgboost_json if kind == XGBOOST_JSON else frontend.from_xgboost_ubjson
                loaded = parse(content, allow_unknown_field=allow_unknown_field)
                columns = xgboost_columns(source.document, source.features, model)
            else:
                iterations, warnings = choose_iterations(None, best_iteration, path, model)
                loaded, columns = self._load(path, kind, model)
            if kind != CHECKPOINT:
                check_checkpoint(loaded.serialize_bytes())
        except (DamagedError, self._treelite.TreeliteError, OSError, UnicodeDecodeError) as error:
            raise unreadable(path, kind, model, self._messages.last or _reason(error)) from error
        return Forest(self, loaded, model, iterations, warnings, columns)

    def _load(self, path: Path, kind: str, model: str) -> tuple[Any, Columns]:
        """The forest, and the columns of files that name them."""
        treelite = self._treelite
        if kind == CHECKPOINT:
            return self._load_checkpoint(path), ()
        if kind == LIGHTGBM:
            header = read_lightgbm(path.read_bytes())
            if header.zero_is_missing:
                raise InvalidArgumentError(
                    f"unable to load '{path}' for model '{model}': it was trained with zero_as_missing, "
                    f"which backend 'fil' cannot honour; set backend: \"lightgbm\", or train it without"
                )
            return treelite.frontend.load_lightgbm_model(path), header.columns
        if kind == XGBOOST:
            return treelite.frontend.load_xgboost_model_legacy_binary(path), ()
        estimator = open_estimator(path, model)
        try:
            names = list(getattr(estimator, "feature_names_in_", ()))
            return treelite.sklearn.import_model(estimator), named_columns(names, len(names))
        except Exception as error:  # of treelite, or of the estimator that it reads
            raise InvalidArgumentError(
                f"unable to load model '{model}': treelite can't convert {type(estimator).__name__} of "
                f"'{path}': {_reason(error)}; serve it with backend 'sklearn'"
            ) from error

    def _load_checkpoint(self, path: Path) -> Any:
        content = path.read_bytes()
        major = int.from_bytes(content[:4], "little", signed=True)
        if major != MAJOR:
            raise DamagedError(
                f"treelite {major} wrote it, and this server reads checkpoints of treelite {MAJOR}; convert "
                f"one of treelite 3.9 with treelite {MAJOR}: treelite.Model.deserialize(path).serialize(path)"
            )
        check_checkpoint(content)
        return self._treelite.Model.deserialize(path)

    def _keep_message(self, text: bytes) -> None:
        """Logs a message of treelite, and keeps it as the reason of an error that may follow."""
        self._messages.last = without_places(_log_message(text))

    def parse_settings(self, settings: dict[str, object]) -> ctypes.c_void_p:
        """A configuration of GTIL; `delete_settings` frees it."""
        handle = ctypes.c_void_p()
        text = json.dumps(settings).encode()
        self.check(self._library.TreeliteGTILParseConfig(text, ctypes.byref(handle)))
        return handle

    def delete_settings(self, handle: ctypes.c_void_p) -> None:
        """Frees a configuration."""
        self._library.TreeliteGTILDeleteConfig(handle)

    @property
    def predict(self) -> Callable[..., int]:
        """GTIL's function in C: forest, rows, their type, their number, results, settings."""
        function: Callable[..., int] = self._library.TreeliteGTILPredict
        return function

    def check(self, status: int) -> None:
        """Raises the last error of this thread unless the status is 0."""
        if status:
            text = (self._library.TreeliteGetLastError() or b"").decode(errors="replace")
            raise InternalError(f"treelite error: {without_places(text)}")


class Forest:
    """A loaded forest.

    Attributes:
        features: Number of input columns.
        classes: Values per row: 1, or one for each class.
        trees: Number of trees.
        has_vectors: True if leaves hold a value for each class.
        is_classifier: True if it was trained as one.
        iterations: Iterations of the booster that are used; 0 for all.
        warnings: Choices that the config leaves open.
        columns: Names and categories of the features.
    """

    def __init__(
        self,
        engine: TreeliteEngine,
        loaded: Any,
        model: str,
        iterations: int,
        warnings: tuple[str, ...],
        columns: Columns = (),
    ) -> None:
        self.engine = engine
        self.loaded = loaded
        self.iterations = iterations
        self.warnings = warnings
        self.columns = columns
        header = self._header = loaded.get_header_accessor()
        targets = int(header.get_field("num_target")[0])
        if targets != 1:
            raise InvalidArgumentError(f"unable to load model '{model}': Multi-target model not supported")
        self.features = int(loaded.num_feature)
        self.classes = int(header.get_field("num_class")[0])
        self.trees = int(loaded.num_tree)
        self.has_vectors = int(header.get_field("leaf_vector_shape")[1]) > 1
        self.is_classifier = int(header.get_field("task_type")[0]) in _CLASSIFIERS

    def force_probabilities(self) -> None:
        """Makes a multi-class forest return probabilities, whatever its objective; before any `Gtil`."""
        self._header.set_field("postprocessor", "identity_multiclass" if self.has_vectors else "softmax")


class Gtil:
    """Predicts rows with a forest; a callable.

    Args:
        forest: The forest, which lives as long as this.
        threads: Threads for large batches.
    """

    def __init__(self, forest: Forest, threads: int) -> None:
        engine = forest.engine
        self._forest = forest
        self._predict = engine.predict
        self._handle = forest.loaded.handle.value
        self._input = np.dtype(forest.loaded.input_type)
        self._type = forest.loaded.input_type.encode()
        self._output = np.dtype(forest.loaded.output_type)
        self._classes = forest.classes
        self._most_alone = _SMALL // max(forest.trees, 1) if threads > 1 else None
        self._alone, self._together = (
            engine.parse_settings({"predict_type": "default", "nthread": count}) for count in (1, threads)
        )
        for settings in (self._alone, self._together):
            weakref.finalize(self, engine.delete_settings, settings).atexit = False

    def __call__(self, rows: Array) -> Array:
        """FP32 results of the shape [rows, classes] for rows of the forest's features; NaN is missing."""
        count = len(rows)
        rows = np.ascontiguousarray(rows, self._input)
        results = np.empty((count, self._classes), self._output)
        alone = self._most_alone is None or count <= self._most_alone
        status = self._predict(
            self._handle,
            rows.__array_interface__["data"][0],
            self._type,
            count,
            results.__array_interface__["data"][0],
            self._alone if alone else self._together,
        )
        if status:
            self._forest.engine.check(status)
        return results if self._output == np.float32 else results.astype(np.float32)


def _read_xgboost(content: bytes, path: Path, kind: str, model: str) -> XgboostModel:
    """Reads a file, of which treelite's own errors would not say how to serve it."""
    found = read_xgboost(content, kind)
    kinds = (
        (found.targets > 1, "Multi-target model not supported"),
        (found.linear, "a linear booster (gblinear) has no trees"),
        (found.has_encoder, "categories of a DataFrame, which treelite does not support"),
    )
    for unserved, reason in kinds:
        if unserved:
            raise InvalidArgumentError(
                f"unable to load model '{model}': {reason}; serve '{path}' with backend 'xgboost'"
            )
    return found


def _log_message(text: bytes) -> str:
    message = text.decode(errors="replace").strip()
    log.info("treelite: %s", message)
    return message


def _reason(error: Exception) -> str:
    return engine_text(error).splitlines()[0]
