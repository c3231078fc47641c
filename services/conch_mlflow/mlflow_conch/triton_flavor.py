"""The flavor ``triton``: a model directory in Triton's layout, as conch and Triton's plug-in read it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.models.model import MLMODEL_FILE_NAME, ModelInfo
from mlflow.models.signature import ModelSignature

FLAVOR = "triton"
_DIRECTORY = "model"


def save_model(
    triton_model: str | Path,
    path: str | Path,
    mlflow_model: Model | None = None,
    signature: ModelSignature | None = None,
) -> None:
    """Saves a model directory as an MLflow model.

    Args:
        triton_model: The model's directory, with version directories such as ``1``.
        path: Directory to write; it must not exist, or be empty.
        mlflow_model: The model to add the flavor to; None for a new one.
        signature: Inputs and outputs, for MLflow's pages and conch's scoring route.

    Raises:
        MlflowException: The directory has no version, or has links.
    """
    source, target = Path(triton_model), Path(path)
    if not source.is_dir():
        raise MlflowException.invalid_parameter_value(f"'{source}' is no directory")
    versions = [
        each for each in source.iterdir() if each.is_dir() and each.name.isascii() and each.name.isdigit()
    ]
    if not versions:
        raise MlflowException.invalid_parameter_value(
            f"'{source}' has no version directory, such as 1: give a model's directory in Triton's layout"
        )
    link = next((each for each in source.rglob("*") if each.is_symlink()), None)
    if link is not None:
        raise MlflowException.invalid_parameter_value(f"'{link}' is a link: give a directory without links")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target / _DIRECTORY)
    model = Model() if mlflow_model is None else mlflow_model
    if signature is not None:
        model.signature = signature
    model.add_flavor(FLAVOR, data=_DIRECTORY)
    model.save(str(target / MLMODEL_FILE_NAME))


def log_model(
    triton_model: str | Path,
    name: str,
    registered_model_name: str | None = None,
    signature: ModelSignature | None = None,
    **more: Any,
) -> ModelInfo:
    """Logs a model directory to the tracking server; conch serves it as it is.

    Args:
        triton_model: The model's directory, with version directories such as ``1``.
        name: Name of the logged model.
        registered_model_name: Registers it as a version of this model; None does not.
        signature: Inputs and outputs, for MLflow's pages and conch's scoring route.
        more: Further arguments of MLflow's ``Model.log``, such as ``tags``.

    Raises:
        MlflowException: The directory has no version, or has links.
    """
    return Model.log(
        artifact_path=None,
        name=name,
        flavor=sys.modules[__name__],
        registered_model_name=registered_model_name,
        triton_model=triton_model,
        signature=signature,
        **more,
    )
