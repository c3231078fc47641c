"""Writes docs/backends/sklearn-estimators.md: ``python scripts/generate_estimators.py``.

It trains each estimator of scikit-learn, saves it by skops and has backend `sklearn` describe it.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sklearn
from sklearn.utils import all_estimators
from tests.support.sklearn_estimators import PAGE, PIPELINES, Served, served, trained

_TEXT = """\
# Estimators of scikit-learn that are served

Each estimator of scikit-learn {version} (`sklearn.utils.all_estimators`), trained, saved by skops and served
by [backend sklearn](trees.md#backends-xgboost-lightgbm-and-sklearn). A test repeats this and compares the
answers with the library's own, with a tolerance of 1e-12. Estimators with `apply` have `leaf` too.

An estimator with \\* is made of types that skops does not trust, and that
[run no code](trees.md#types-in-skops-files): conch loads them. None needs `CONCH_TRUSTED_TYPES`; functions
and classes of your own do.

| input | outputs | estimators |
|---|---|---|
{served}

Refused:

| reason | estimators |
|---|---|
{refused}

Clusterings and embeddings without `predict` or `transform` say nothing about new rows. The refused ones can
be parts of a [Python model](../python-models.md).

Pipelines that the same test serves:

| pipeline | inputs | outputs |
|---|---|---|
{pipelines}
"""


def main() -> None:
    """Writes the page."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.skops"
        rows = [served(name, trained(name).estimator, path) for name, _ in all_estimators()]
        pipelines = [served(name, trained(name).estimator, path) for name in PIPELINES]
    PAGE.write_text(page_of(rows, pipelines))


def page_of(rows: Sequence[Served], pipelines: Sequence[Served]) -> str:
    """The page's text."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.offer is None:
            refused[row.reason].append(row.name)
        else:
            groups[row.input, row.outputs].append(row.name + "\\*" * row.own_types)
    return _TEXT.format(
        version=sklearn.__version__,
        served="\n".join(
            f"| {given} | {outputs} | {', '.join(names)} |"
            for (given, outputs), names in sorted(groups.items())
        ),
        refused="\n".join(f"| {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items())),
        pipelines="\n".join(f"| {row.name} | {row.input} | {row.outputs} |" for row in pipelines),
    )


if __name__ == "__main__":
    main()
