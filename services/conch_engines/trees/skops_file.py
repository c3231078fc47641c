"""Opens scikit-learn models that skops has saved, without running code of theirs.

skops builds objects of types that it knows to be harmless, and lists all others, which are refused here
unless they are harmless types that it does not know. Threads and locks: none. Used by: `forest`,
`sklearn_backend`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_engines.trees.model_files import SKLEARN, unreadable

_HARMLESS_TYPES = frozenset(
    {
        "builtins.object",
        "numpy.dtype",
        "sklearn.compose._column_transformer.make_column_selector",
        "sklearn.tree._tree.Tree",
        "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
        "sklearn.ensemble._hist_gradient_boosting.binning._BinMapper",
    }
)
"""Nodes of scikit-learn's trees, and selections of columns; skops does not trust them by itself."""


def open_estimator(path: Path, model: str) -> Any:
    """Opens an estimator.

    Raises:
        InvalidArgumentError: The file has types that could run code.
        InternalError: The file can't be read.
        UnavailableError: skops or scikit-learn is not installed.
    """
    try:
        import skops.io
    except ModuleNotFoundError as error:
        raise missing_package(error, model, "a scikit-learn model") from error
    untrusted = _untrusted(skops.io, path, model)
    foreign = sorted(set(untrusted) - _HARMLESS_TYPES)
    if foreign:
        raise InvalidArgumentError(
            f"unable to load model '{model}': '{path}' has types that could run code when they are loaded: "
            f"{', '.join(foreign)}; save a model of scikit-learn's own types"
        )
    try:
        with warnings.catch_warnings(record=True):  # other versions of scikit-learn, which mostly work
            warnings.simplefilter("always")
            return skops.io.load(path, trusted=untrusted)
    except Exception as error:  # skops raises whatever the types raise
        raise unreadable(path, SKLEARN, model, _text(error)) from error


def _untrusted(skops_io: Any, path: Path, model: str) -> list[str]:
    try:
        return list(skops_io.get_untrusted_types(file=path))
    except Exception as error:
        raise unreadable(path, SKLEARN, model, _text(error)) from error


def missing_package(
    error: ModuleNotFoundError, model: str, purpose: str, install: str = "conch[trees]"
) -> UnavailableError:
    """The error for a package that only some models need."""
    return UnavailableError(
        f"unable to load model '{model}': {purpose} needs the Python package '{error.name}', which is not "
        f"installed; install it with `pip install {install}`"
    )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
