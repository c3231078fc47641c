"""The model repository with the recommended candidate."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import AlreadyExistsError
from conch_tools.optimize.candidate_config import config_text, write_warmup
from conch_tools.optimize.options import OptimizeOptions
from conch_tools.optimize.original import Original
from conch_tools.optimize.sample_data import as_datatype


class ResultRepository:
    """Writes the repository, and copies its model to the user's.

    Args:
        path: The repository; what is there is removed first.
        name: The model's name.
        options: With the user's repository and labels.

    Attributes:
        path: The repository.
        model: The model's name.

    Raises:
        AlreadyExistsError: The user's repository has such a model.
    """

    def __init__(self, path: Path, name: str, options: OptimizeOptions) -> None:
        self.model = name
        self.path, self._options = path, options
        if options.apply is not None and (place := options.apply / name).exists():
            raise AlreadyExistsError(
                f"--apply: there is '{place}' already; give another --name, or remove it"
            )

    def clear(self) -> None:
        """Removes the repository of an earlier run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write(self, original: Original, candidate: Path, result: Mapping[str, Any]) -> Path:
        """Writes the repository with the candidate of a folder; returns its path."""
        options = self._options
        model = self.path / self.model
        model.mkdir(parents=True)
        shutil.copytree(candidate / "1", model / "1")
        kind = options.kinds[next(each for each in options.steps if each.name == result["chain"][-1]).result]
        signature = original.signature.changed_by(result)
        sample = {
            each.name: as_datatype(original.sample[each.original], each.datatype) for each in signature.inputs
        }
        write_warmup(model, signature, sample)
        for file in (model / "warmup").iterdir():
            # conch tune continues a search of a model whose files have the same times.
            shutil.copystat(candidate / "config.pbtxt", file)
        labels = ""
        if options.labels is not None:
            labels = options.labels.name
            shutil.copy2(options.labels, model / labels)
        text = config_text(
            kind,
            signature,
            original.batch,
            result["parameters"],
            name=self.model,
            warmup=sample,
            labels=labels,
        )
        (model / "config.pbtxt").write_text(text)
        return self.path

    def apply(self) -> None:
        """Copies the model to the user's repository, if there is one."""
        if self._options.apply is not None:
            shutil.copytree(self.path / self.model, self._options.apply / self.model)
