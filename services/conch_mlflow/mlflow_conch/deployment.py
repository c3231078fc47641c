"""The deployment plug-in: ``mlflow deployments -t conch://host:8000``.

A deployment is a model of the server. With ``-C alias=NAME`` the server has an ``mlflow://`` repository: the
alias is moved to the version, and the server follows it. Without it the model's files are sent with a load.

MLflow wants this module to have exactly one subclass of ``BaseDeploymentClient``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow.artifacts
import pandas as pd
from mlflow import MlflowClient
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST

from mlflow_conch.conch_server import TOKEN_VARIABLE, ConchServer, check_name
from mlflow_conch.model_files import read_model

_MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>[0-9]+)|@(?P<alias>[^/@]+))")
_KEYS = ("alias", "steps", "timeout")
_TIMEOUT_S = 600.0
_REGISTRY = "registry"
"""The flavor that is shown where the server's repository chooses it."""
_CANDIDATE = "challenger"
"""Alias of the version that a rollout brings, unless another one is given."""

_HELP = f"""\
Deploys models to a conch server.

Target: conch://host:8000, or conchs://host:8000 with TLS; the port is that of REST. The variable
{TOKEN_VARIABLE} has the key or token of the server's access policy; REQUESTS_CA_BUNDLE names certificates.

Without an alias the model's files are sent to the server, which needs --model-control-mode=explicit, and an
access policy or --allow-model-upload. With an alias the server needs --model-repository=mlflow://...,
and the model URI is models:/NAME/VERSION: the alias is moved to the version.

Config of create and update:
  -C alias=NAME     move this alias of the registered model, and wait until the server has the version ready
  -C steps=STEPS    bring the version by a rollout, with these steps: "5% 10m, 25% 10m"; alias is
                    {_CANDIDATE} by default; modes poll and watch need an access policy
  -C timeout=SECS   the longest wait; {_TIMEOUT_S:g} by default
Config of delete:
  -C alias=NAME     remove the alias instead of unloading the model
"""


def target_help() -> str:
    """The help of ``mlflow deployments help -t conch``."""
    return _HELP


def run_local(
    target: str, name: str, model_uri: str, flavor: str | None = None, config: Mapping[str, Any] | None = None
) -> None:
    """Serves a model by a conch of this machine until it is interrupted.

    Raises:
        MlflowException: The name or the model can't be served, or conch fails.
    """
    check_name(name)
    _settings(config, ())
    with tempfile.TemporaryDirectory(prefix="conch-mlflow-") as directory:
        repository = Path(directory, "repository")
        read_model(_downloaded(model_uri, directory), flavor or "").write(repository / name)
        command = [str(Path(sys.executable).with_name("conch")), "serve", f"--model-repository={repository}"]
        try:
            code = subprocess.run(command, check=False).returncode
        except KeyboardInterrupt:  # conch has got it too
            return
    if code:
        raise MlflowException(f"conch has ended with exit code {code}")


class ConchDeploymentClient(BaseDeploymentClient):  # type: ignore[misc]
    """Deploys models to a conch server.

    Args:
        target_uri: ``conch://host:port``, or ``conchs://host:port`` with TLS.
    """

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)
        self._server = ConchServer(target_uri)

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: Mapping[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Deploys a model, and waits until it is ready. Raises MlflowException: it exists, or fails."""
        settings = _checked(name, config, endpoint, _KEYS)
        alias = _alias(settings)
        for each in self._server.versions(name):
            if each.get("state") == "READY" and (not alias or alias in each.get("labels", ())):
                what = f"deployment '{name}' exists" + (f" with alias '{alias}'" if alias else "")
                raise MlflowException(f"{what}: update it", RESOURCE_ALREADY_EXISTS)
        return self._deploy(name, model_uri, flavor, settings)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: Mapping[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Deploys another version, and waits until it is ready. Raises MlflowException: it fails."""
        settings = _checked(name, config, endpoint, _KEYS)
        if model_uri is None:
            raise MlflowException.invalid_parameter_value(
                "a deployment is updated by a model: give --model-uri"
            )
        self._found(name)
        return self._deploy(name, model_uri, flavor, settings)

    def delete_deployment(
        self, name: str, config: Mapping[str, Any] | None = None, endpoint: str | None = None
    ) -> None:
        """Unloads a model, or removes an alias; a missing one is no error."""
        settings = _checked(name, config, endpoint, ("alias",))
        if settings.get("alias"):
            registered = MlflowClient()
            try:
                registered.delete_registered_model_alias(name, settings["alias"])
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        else:
            self._server.unload(name)

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        """The models that have a version, by name."""
        _refuse_endpoint(endpoint)
        entries: dict[str, list[dict[str, Any]]] = {}
        for each in self._server.index():
            if "version" in each:
                entries.setdefault(each["name"], []).append(each)
        return [self._described(name, found) for name, found in entries.items()]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        """A model with its versions, their states and labels. Raises MlflowException: there is none."""
        _refuse_endpoint(endpoint)
        return self._described(name, self._found(check_name(name)))

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> PredictionsResponse:
        """Predictions for a DataFrame, an array, or arrays by name. Raises MlflowException: they fail."""
        _refuse_endpoint(endpoint)
        body = _scoring_body(inputs)
        return PredictionsResponse(self._server.score(check_name(deployment_name or ""), body))

    def predict_stream(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The responses of a model as they come; `inputs` are values by input and parameter."""
        _refuse_endpoint(endpoint)
        if not isinstance(inputs, Mapping):
            raise MlflowException.invalid_parameter_value("inputs of a stream are a dict of inputs by name")
        yield from self._server.stream(check_name(deployment_name or ""), inputs)

    def _deploy(
        self, name: str, model_uri: str, flavor: str | None, settings: Mapping[str, str]
    ) -> dict[str, Any]:
        timeout_s = _seconds(settings.get("timeout"))
        alias = _alias(settings)
        if not alias:
            with tempfile.TemporaryDirectory(prefix="conch-mlflow-") as directory:
                files = read_model(_downloaded(model_uri, directory), flavor or "")
            self._server.load(name, files.load_parameters(), timeout_s)
            return {"name": name, "flavor": flavor or files.backend or "triton"}
        if flavor:
            raise MlflowException.invalid_parameter_value(
                "with an alias the flavor is that of tag conch.flavor: leave --flavor out"
            )
        client = MlflowClient()
        registered, version = _registered(client, model_uri)
        failures = self._server.failures(name)
        client.set_registered_model_alias(registered, alias, version)
        self._server.follow(name, timeout_s)
        self._server.wait_ready(name, version, alias, timeout_s, failures)
        if settings.get("steps"):
            steps = [step.strip() for step in settings["steps"].split(",")]
            rollout = {"candidate": int(version), "steps": steps}
            self._server.start_rollout(name, {"rollout": rollout})
        return {"name": name, "flavor": _REGISTRY, "version": version, "alias": alias}

    def _found(self, name: str) -> list[dict[str, Any]]:
        entries = self._server.versions(name)
        if not entries:
            raise MlflowException(
                f"there is no deployment '{name}' at {self.target_uri}", RESOURCE_DOES_NOT_EXIST
            )
        return entries

    def _described(self, name: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        kept = ("version", "state", "reason", "labels", "traffic")
        versions = [{key: each[key] for key in kept if key in each} for each in entries]
        return {"name": name, "url": f"{self._server.url}/v2/models/{name}", "versions": versions}


def _checked(
    name: str, config: Mapping[str, Any] | None, endpoint: str | None, known: tuple[str, ...]
) -> Mapping[str, str]:
    _refuse_endpoint(endpoint)
    check_name(name)
    return _settings(config, known)


def _settings(config: Mapping[str, Any] | None, known: tuple[str, ...]) -> Mapping[str, str]:
    for key in config or {}:
        if key not in known:
            told = f"known are {', '.join(known)}" if known else "there is none"
            raise MlflowException.invalid_parameter_value(f"config '{key}' is not known here: {told}")
    return {key: str(value) for key, value in (config or {}).items()}


def _refuse_endpoint(endpoint: str | None) -> None:
    if endpoint is not None:
        raise MlflowException.invalid_parameter_value("conch has no endpoints: leave --endpoint out")


def _alias(settings: Mapping[str, str]) -> str:
    """The alias to move; empty if the files are sent."""
    return settings.get("alias") or (_CANDIDATE if settings.get("steps") else "")


def _seconds(text: str | None) -> float:
    if text is None:
        return _TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise MlflowException.invalid_parameter_value(
            f"config 'timeout' is '{text}': give seconds, more than 0"
        )
    return seconds


def _registered(client: MlflowClient, model_uri: str) -> tuple[str, str]:
    """Registered model and version of a URI. Raises MlflowException: it names none."""
    found = _MODEL_URI.fullmatch(model_uri)
    if found is None:
        raise MlflowException.invalid_parameter_value(
            f"'{model_uri}' names no version of a registered model: with an alias write models:/NAME/VERSION"
        )
    if found["alias"] is None:
        return found["name"], found["version"]
    return found["name"], str(client.get_model_version_by_alias(found["name"], found["alias"]).version)


def _downloaded(model_uri: str, directory: str) -> Path:
    return Path(mlflow.artifacts.download_artifacts(model_uri, dst_path=directory))


def _scoring_body(inputs: Any) -> dict[str, Any]:
    """A request of the scoring protocol."""
    if isinstance(inputs, pd.DataFrame):
        return {"dataframe_split": json.loads(inputs.to_json(orient="split", date_format="iso"))}
    if hasattr(inputs, "tolist"):
        inputs = inputs.tolist()
    if isinstance(inputs, Mapping):
        listed = {name: each.tolist() if hasattr(each, "tolist") else each for name, each in inputs.items()}
        return {"inputs": listed}
    return {"inputs": inputs}
