"""Actions of admins on the console: loads, unloads, draining, settings. Each is a line of the log.

Blocking: a load takes as long as it takes. Threads and locks: pool threads; sampling has a lock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from conch.core.errors import ConchError, InvalidArgumentError, PermissionDeniedError, UnavailableError
from conch.core.model_control import LoadParameter
from conch.core.server_stage import Stage
from conch.core.server_state import ServerState
from conch.observability.logging.log_settings import LogControl
from conch_console.config_view import ConfigView
from conch_console.console_access import User
from conch_console.trace_sampling import TraceSampling
from conch_control.agent_api import AgentApi
from conch_control.lifecycle.access_policy import code_of_load

log = logging.getLogger(__name__)

_ROLLOUT_ACTIONS = ("pause", "resume", "advance", "promote", "abort", "rollback")


class LoadFailedError(Exception):
    """A load that failed.

    Attributes:
        error: Cause of the failure.
        findings: Findings of `conch check` for the model.
    """

    def __init__(self, error: ConchError, findings: list[dict[str, Any]]) -> None:
        super().__init__(error.message)
        self.error = error
        self.findings = findings


class ConsoleActions:
    """Changes models and settings for a user.

    Args:
        core: The server core.
        agent: The control plane.
        configs: Says what is wrong with a model that fails to load.
        logs: Log settings.
        sampling: Samples traces.
        takes_code: True if a config may choose code, as users are identified.
    """

    def __init__(
        self,
        core: ServerState,
        agent: AgentApi,
        configs: ConfigView,
        logs: LogControl,
        sampling: TraceSampling,
        takes_code: bool,
    ) -> None:
        self._takes_code = takes_code
        self._core = core
        self._agent = agent
        self._configs = configs
        self._logs = logs
        self._sampling = sampling

    def load(self, user: User, name: str, given: Mapping[str, Any]) -> None:
        """Loads or reloads a model."""
        self._check_running()
        config = given.get("config", "")
        if not isinstance(config, str):
            raise InvalidArgumentError("config must be the text of a config in JSON")
        parameters: dict[str, LoadParameter] = {"config": config} if config.strip() else {}
        code = "" if self._takes_code else code_of_load(parameters)
        if code:
            raise PermissionDeniedError(
                f"the load of model '{name}' brings {code}: that is taken only from users with a token, a "
                f"key or a client certificate, which --console-token-file or --access-policy gives them"
            )
        what = "with a config of the console" if parameters else "as it is in its repository"
        self._note(user, "loads '%s' %s", name, what)
        try:
            self._agent.load(name, parameters)
        except ConchError as error:
            log.info("console: the load of '%s' by %s failed: %s", name, user.name, error.message)
            findings = [] if parameters else self._configs.findings(name)
            raise LoadFailedError(error, findings) from None
        log.info("console: '%s' is loaded, as %s asked", name, user.name)

    def unload(self, user: User, name: str, given: Mapping[str, Any]) -> None:
        """Unloads a model; with ``dependents`` also what was loaded for it only."""
        self._check_running()
        dependents = _switch(given, "dependents")
        self._note(user, "unloads '%s'%s", name, " and the models loaded for it only" if dependents else "")
        self._agent.unload(name, dependents)

    def change_rollout(self, user: User, name: str, given: Mapping[str, Any]) -> None:
        """Does something about a model's rollout."""
        self._check_running()
        action = given.get("action")
        if action not in _ROLLOUT_ACTIONS:
            raise InvalidArgumentError(f"action must be one of {', '.join(_ROLLOUT_ACTIONS)}")
        self._note(user, "asks the rollout of '%s' to %s", name, action)
        self._agent.update_rollout(name, action)

    def drain(self, user: User) -> None:
        """Makes the server not ready."""
        self._check_running()
        self._note(user, "drains the server")
        self._agent.drain()

    def change_log(self, user: User, given: Mapping[str, Any]) -> dict[str, Any]:
        """Changes log settings; returns all."""
        self._note(user, "changes log settings: %s", dict(given))
        return self._logs.update(given)

    def change_traces(self, user: User, given: Mapping[str, Any]) -> dict[str, Any]:
        """Changes global trace settings; returns all."""
        changes: dict[str, list[str]] = {}
        for name, values in given.items():
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise InvalidArgumentError(f"{name} must be a list of texts")
            changes[name] = values
        self._note(user, "changes trace settings: %s", changes)
        return {name: list(values) for name, values in self._sampling.settings.update(changes).items()}

    def sample(self, user: User, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Samples the next requests of a model, or of all without a name, and then no more than before."""
        number = given.get("count", 10)
        if not isinstance(number, int) or not 1 <= number <= 256:
            raise InvalidArgumentError("count must be a number from 1 to 256")
        self._note(user, "samples the next %d requests%s", number, f" of '{model}'" if model else "")
        self._sampling.sample_next(model, number)
        return self._sampling.state()

    def _note(self, user: User, text: str, *values: object) -> None:
        log.info(f"console: %s {text}", user.name, *values)

    def _check_running(self) -> None:
        if self._core.stages.stage is Stage.STOPPING:
            raise UnavailableError("Server exiting")


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be true or false")
    return value
