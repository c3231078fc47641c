"""Finds imports of a model's file that would fail, without running it; used by `conch check`.

Counts only module-level imports outside `try`, functions and conditions, which always run.
"""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path


def missing_imports(source: Path, directories: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """Yields line and top-level name of each missing import; yields nothing for a file with syntax errors.

    Args:
        source: The model's file.
        directories: Directories with the model's own modules.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the model's code
            tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    seen: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top not in seen and not _is_there(top, directories):
                yield node.lineno, top
            seen.add(top)


def _is_there(name: str, directories: Sequence[Path]) -> bool:
    if any((each / f"{name}.py").is_file() or (each / name).is_dir() for each in directories):
        return True
    if any(next(each.glob(f"{name}.*.so"), None) for each in directories):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
