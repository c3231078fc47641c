"""Calls of a conch server's REST API, with an Airflow connection's address and token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

import requests
from airflow.sdk import BaseHook

TIMEOUT_S = 30.0
"""Timeout, in seconds, of calls that a server answers at once."""
# Of proxies whose server does not answer.
_NO_ANSWER = (requests.codes.bad_gateway, requests.codes.gateway_timeout)


class ConchError(Exception):
    """An error that the server has answered with; its text is the server's.

    Attributes:
        status: The HTTP status; 0 for an error that comes of several calls.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class ConchUnreachableError(ConchError):
    """The server has not answered."""


class ConchHook(BaseHook):
    """Calls a conch server.

    The connection has the type ``conch``: host, port (8000), schema (``http`` or ``https``), and a token as
    password, which is sent as ``authorization: Bearer TOKEN``.

    Args:
        conch_conn_id: The Airflow connection.
        connection: The connection itself, if it has been fetched already.
    """

    conn_name_attr = "conch_conn_id"
    default_conn_name = "conch_default"
    conn_type = "conch"
    hook_name = "conch"

    def __init__(self, conch_conn_id: str = default_conn_name, connection: Any = None) -> None:
        super().__init__()
        self._connection_id = conch_conn_id
        self._given = connection

    @cached_property
    def _connection(self) -> Any:
        return self._given or self.get_connection(self._connection_id)

    @cached_property
    def _session(self) -> requests.Session:
        session = requests.Session()
        if token := self._connection.password:
            # A header of the session gives way to ~/.netrc.
            session.auth = _Bearer(token)
        return session

    @property
    def base_url(self) -> str:
        """The server's URL."""
        connection = self._connection
        host = connection.host or "localhost"
        if ":" in host:
            host = f"[{host.strip('[]')}]"
        return f"{connection.schema or 'http'}://{host}:{connection.port or 8000}"

    def get_conn(self) -> requests.Session:
        """The HTTP session, with the token."""
        return self._session

    def test_connection(self) -> tuple[bool, str]:
        """Asks for the server's metadata; returns True if it answers, and the text for Airflow's page."""
        try:
            server = self.call("GET", "")
        except ConchError as error:
            return False, str(error)
        return True, f"{self.base_url} answers as {server['name']} {server['version']}"

    def call(self, method: str, path: str, body: Any = None, timeout: float = TIMEOUT_S) -> Any:
        """Sends a request.

        Args:
            method: The HTTP method.
            path: Path behind ``/v2``.
            body: Sent as JSON; None for none.
            timeout: Seconds to wait for the answer.

        Returns:
            The JSON of the answer; None for an empty body.

        Raises:
            ConchUnreachableError: There is no answer in time.
            ConchError: The answer is an error.
        """
        answer = self._send(method, path, body, timeout)
        if not answer.ok:
            raise _error_of(answer)
        return answer.json() if answer.content else None

    def _send(
        self, method: str, path: str, body: Any = None, timeout: float = TIMEOUT_S
    ) -> requests.Response:
        url = f"{self.base_url}/v2{path}"
        try:
            answer = self._session.request(method, url, json=body, timeout=timeout)
        except requests.RequestException as error:
            raise ConchUnreachableError(f"{method} {url}: {error}") from error
        if answer.status_code in _NO_ANSWER:
            raise ConchUnreachableError(f"{method} {url}: status {answer.status_code}")
        return answer

    def ready(self, model: str, version: int | str | None = None) -> bool:
        """True if a version is ready; without one, the version that requests without a version get."""
        answer = self._send("GET", f"{_model_path(model, version)}/ready")
        if not answer.ok and answer.status_code != requests.codes.bad_request:
            raise _error_of(answer)
        return bool(answer.ok)

    def index(self, model: str) -> list[dict[str, Any]]:
        """The lines of the repository index about a model."""
        return [line for line in self.call("POST", "/repository/index") if line["name"] == model]

    def stable_version(self, model: str) -> str:
        """The version that has the label ``stable``; empty if none has."""
        lines = self.index(model)
        return next((str(line["version"]) for line in lines if "stable" in line.get("labels", ())), "")

    def config(self, model: str) -> dict[str, Any]:
        """The config that a model is served with."""
        found: dict[str, Any] = self.call("GET", f"{_model_path(model)}/config")
        return found

    def statistics(self, model: str, version: int | str) -> dict[str, Any]:
        """The statistics of a version."""
        found: dict[str, Any] = self.call("GET", f"{_model_path(model, version)}/stats")["model_stats"][0]
        return found

    def load(self, model: str, config: Mapping[str, Any] | None = None, timeout: float = TIMEOUT_S) -> None:
        """Loads a model from its repository, and waits for it; `config` replaces the repository's."""
        body = {"parameters": {"config": json.dumps(config)}} if config else {}
        self.call("POST", f"/repository/models/{quote(model, safe='')}/load", body, timeout)

    def unload(self, model: str) -> None:
        """Unloads a model."""
        self.call("POST", f"/repository/models/{quote(model, safe='')}/unload", {})

    def rollout(self, model: str) -> dict[str, Any]:
        """The server's report of a model's rollout."""
        found: dict[str, Any] = self.call("GET", f"/repository/models/{quote(model, safe='')}/rollout")
        return found

    def start_rollout(self, model: str, declaration: Mapping[str, Any]) -> dict[str, Any]:
        """Starts a rollout, with the fields of the table ``[rollout]`` in ``rollout.toml``."""
        path = f"/repository/models/{quote(model, safe='')}/rollout"
        found: dict[str, Any] = self.call("POST", path, {"rollout": dict(declaration)})
        return found

    def infer(
        self, model: str, version: int | str, inputs: Sequence[Mapping[str, Any]], timeout: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """Sends an inference request, with inputs as in its JSON; returns outputs by name."""
        body = {"inputs": list(inputs)}
        answer = self.call("POST", f"{_model_path(model, version)}/infer", body, timeout)
        return {output["name"]: output["data"] for output in answer["outputs"]}


class _Bearer(requests.auth.AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["authorization"] = f"Bearer {self._token}"
        return request


def _model_path(model: str, version: int | str | None = None) -> str:
    path = f"/models/{quote(model, safe='')}"
    return path if version is None else f"{path}/versions/{quote(str(version), safe='')}"


def _error_of(answer: requests.Response) -> ConchError:
    """The server's sentence, or of another server the beginning of its page."""
    try:
        text = str(answer.json()["error"]).strip()
    except (ValueError, KeyError, TypeError):
        text = f"{answer.request.method} {answer.url}: status {answer.status_code}: {answer.text[:200]}"
    return ConchError(text, answer.status_code)
