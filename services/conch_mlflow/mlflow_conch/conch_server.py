"""A conch server by its REST API; errors are MLflow's, with conch's text."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from time import monotonic_ns
from typing import Any
from urllib.parse import quote, urlsplit

import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INTERNAL_ERROR,
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    RESOURCE_DOES_NOT_EXIST,
    TEMPORARILY_UNAVAILABLE,
    ErrorCode,
)

TOKEN_VARIABLE = "CONCH_TOKEN"
"""Variable with the key or token that the server's access policy asks for."""

_TARGET = re.compile(r"conchs?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?/?")
_CODES = {
    400: INVALID_PARAMETER_VALUE,
    401: PERMISSION_DENIED,
    403: PERMISSION_DENIED,
    404: RESOURCE_DOES_NOT_EXIST,
    503: TEMPORARILY_UNAVAILABLE,
}
_CONNECT_S, _ANSWER_S = 10.0, 300.0
_PAUSE_S = 0.5


def check_name(name: str) -> str:
    """The name of a deployment, if it can be that of a model. Raises MlflowException: it can't."""
    wrong = not name or name in (".", "..") or name.strip() != name or not name.isprintable()
    if wrong or any(each in name for each in ("/", "\\", "::")):
        raise MlflowException.invalid_parameter_value(
            f"{name!r} can't be the name of a model, which has no '/', '\\' or '::' and no spaces around it"
        )
    return name


class ConchServer:
    """A server.

    Args:
        target: ``conch://host:port``, or ``conchs://host:port`` with TLS.

    Raises:
        MlflowException: The target is malformed.
    """

    def __init__(self, target: str) -> None:
        if _TARGET.fullmatch(target) is None:
            raise MlflowException.invalid_parameter_value(
                f"'{target}' is no target: write conch://host:8000, or conchs://host:8000 with TLS"
            )
        place = urlsplit(target)
        self.url = f"{'https' if place.scheme == 'conchs' else 'http'}://{place.netloc}"
        self._session = requests.Session()
        token = os.environ.get(TOKEN_VARIABLE, "")
        if token:
            self._session.headers["authorization"] = f"Bearer {token}"

    def index(self) -> list[dict[str, Any]]:
        """The models and their versions, with states and labels; one without a version has failed."""
        found: list[dict[str, Any]] = self._ask("POST", "/v2/repository/index", {})
        known = {(each["name"], each.get("version")) for each in found}
        # Models that came with files are in no repository.
        for each in self._ask("GET", "/v2/models/stats")["model_stats"]:
            if (each["name"], each["version"]) not in known:
                found.append({"name": each["name"], "version": each["version"], "state": "READY"})
        return found

    def versions(self, model: str) -> list[dict[str, Any]]:
        """The versions of a model."""
        return [each for each in self.index() if each["name"] == model and "version" in each]

    def load(self, model: str, parameters: Mapping[str, str], timeout_s: float) -> None:
        """Loads a model, with files or as it is in the repository, and waits until it is ready."""
        path = f"/v2/repository/models/{quote(model, safe='')}/load"
        self._ask("POST", path, {"parameters": dict(parameters)}, timeout_s)

    def follow(self, model: str, timeout_s: float) -> None:
        """Has the server look at its repository now; one that polls does so by itself."""
        try:
            self.load(model, {}, timeout_s)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(TEMPORARILY_UNAVAILABLE):
                raise

    def unload(self, model: str) -> None:
        """Unloads a model; one that is not loaded is ignored."""
        self._ask("POST", f"/v2/repository/models/{quote(model, safe='')}/unload", {})

    def start_rollout(self, model: str, declaration: Mapping[str, Any]) -> None:
        """Starts a rollout."""
        self._ask("POST", f"/v2/repository/models/{quote(model, safe='')}/rollout", declaration)

    def score(self, model: str, body: Mapping[str, Any]) -> Any:
        """Answers a request of MLflow's scoring protocol."""
        return self._ask("POST", f"/v2/models/{quote(model, safe='')}/invocations", body)

    def stream(self, model: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The responses of a model to a generate request, as they come."""
        path = f"/v2/models/{quote(model, safe='')}/generate_stream"
        with self._send("POST", path, body, _ANSWER_S, stream=True) as response:
            for line in response.iter_lines():
                if line.startswith(b"data:"):
                    found = json.loads(line[len(b"data:") :])
                    if "error" in found:
                        raise MlflowException(str(found["error"]), INTERNAL_ERROR)
                    yield found

    def wait_ready(
        self, model: str, version: str, label: str, timeout_s: float, old: Collection[str]
    ) -> None:
        """Waits until a version of a model is ready and has a label; `old` are reasons of former failures.

        Raises:
            MlflowException: Its load fails, or the time is over; the text has the server's reason.
        """
        end = monotonic_ns() + round(timeout_s * 1e9)
        pause = threading.Event()
        while True:
            for each in self.versions(model):
                if (each["version"], each["state"]) == (version, "READY") and label in each.get("labels", ()):
                    return
            for reason in self.failures(model):
                if reason not in old:
                    raise MlflowException(f"version {version} of '{model}' can't be loaded: {reason}")
            if monotonic_ns() > end:
                raise MlflowException(
                    f"version {version} of '{model}' is not ready after {timeout_s:g} s: the server needs an "
                    f"mlflow:// repository that has it, and alias '{label}' in its ?alias=, if there is one",
                    TEMPORARILY_UNAVAILABLE,
                )
            pause.wait(_PAUSE_S)

    def failures(self, model: str) -> list[str]:
        """Reasons for which versions of a model, or the model as a whole, could not be loaded."""
        return [
            each["reason"]
            for each in self.index()
            if each["name"] == model
            and each.get("state") == "UNAVAILABLE"
            and each.get("reason", "unloaded") != "unloaded"
        ]

    def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = _ANSWER_S) -> Any:
        with self._send(method, path, body, timeout_s) as response:
            return response.json() if response.content else None

    def _send(
        self, method: str, path: str, body: Any, timeout_s: float, stream: bool = False
    ) -> requests.Response:
        try:
            response = self._session.request(
                method,
                self.url + path,
                json=body,
                timeout=(_CONNECT_S, timeout_s),
                stream=stream,
            )
        except requests.RequestException as error:
            raise MlflowException(f"{self.url} does not answer: {error}", TEMPORARILY_UNAVAILABLE) from None
        if response.ok:
            return response
        try:
            text = str(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            text = response.reason
        response.close()
        code = _CODES.get(response.status_code, INTERNAL_ERROR)
        raise MlflowException(f"{self.url} answers {response.status_code}: {text}", code)
