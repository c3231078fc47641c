"""Finds imports of a model's file that fail, without running the file; used by `conch check`.

Only imports that always run count: statements of the module itself, outside `try`, functions and conditions.
"""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path


def missing_imports(source: Path, directories: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """Yields the line and the top name of each import that finds nothing; nothing for a file with errors.

    Args:
        source: The model's file.
        directories: Where modules of the model's own are.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the model's author writes
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
