"""An MLflow model as a model directory, by the same rules as in an ``mlflow://`` repository."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow.exceptions import MlflowException

from conch.core.errors import ConchError
from conch_control.config.json_format import to_json
from conch_control.config.parse import decode_config
from conch_control.repository.layout import CONFIG_FILE
from conch_mlflow.flavors import MLMODEL, Artifact, FlavorError, parse_yaml, plan_version
from conch_stores.stores import StoredObject

_VERSION = "1"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model with one version.

    Attributes:
        config: The config file; empty for none.
        contents: Contents of the other files, by path in the model's directory.
        backend: The engine; empty if the server finds it by the files.
    """

    config: bytes
    contents: Mapping[str, bytes]
    backend: str = ""

    def load_parameters(self) -> dict[str, str]:
        """The parameters of a load request."""
        config = to_json(decode_config(self.config, CONFIG_FILE)) if self.config else {}
        encoded = {path: base64.b64encode(content).decode() for path, content in self.contents.items()}
        return {"config": json.dumps(config), **{f"file:{path}": text for path, text in encoded.items()}}

    def write(self, directory: Path) -> None:
        """Writes the model's directory."""
        for path, content in {CONFIG_FILE: self.config, **self.contents}.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)


def read_model(directory: Path, flavor: str) -> ModelFiles:
    """Reads an MLflow model; `flavor` is empty for the first that an engine serves.

    Raises:
        MlflowException: It is no MLflow model, or no engine serves it.
    """
    files = {
        path.relative_to(directory).as_posix(): StoredObject(str(path), path.stat().st_size, "", 0)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }

    def read(item: StoredObject, start: int, end: int) -> bytes:
        with Path(item.path).open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start)

    try:
        text = Artifact({}, files, read).text(MLMODEL)
        artifact = Artifact(parse_yaml(text, MLMODEL), files, read)
        # A client that may load models with files may have the server run code anyway.
        plan = plan_version(artifact, flavor, allow_code=True)
        if plan.problem:
            raise FlavorError(plan.problem)
        backend = decode_config(plan.config, CONFIG_FILE).backend
    except (ConchError, FlavorError) as error:
        raise MlflowException.invalid_parameter_value(f"the model can't be served: {error}") from None
    contents = {f"{_VERSION}/{path}": content for path, content in plan.made.items()}
    contents |= {f"{_VERSION}/{path}": Path(item.path).read_bytes() for path, item in plan.files.items()}
    contents |= {path: Path(item.path).read_bytes() for path, item in plan.shared.items()}
    return ModelFiles(plan.config, contents, backend)
