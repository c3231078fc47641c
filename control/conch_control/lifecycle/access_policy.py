"""Applies control mode and access rules to the agent's callers: clients and models."""

from __future__ import annotations

from collections.abc import Mapping

from conch.core.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError
from conch.core.model_control import IndexEntry, LoadParameter, ModelControl
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import parse_override
from conch_control.config.powers import config_powers
from conch_control.control_options import MOST_CONFIG_BYTES, ControlMode
from conch_control.lifecycle.load_overrides import CONFIG, read_overrides
from conch_control.repository.uploads import FILE_PREFIX


class GuardedAgent:
    """The agent as front ends see it; a `conch.core.model_control.ClientModelControl`.

    Changes are for the control port only unless `allowed`, and need mode ``explicit`` or ``on-demand``; those
    of rollouts do not if callers are `identified`.
    """

    def __init__(
        self,
        agent: ModelControl,
        mode: ControlMode,
        allowed: bool = True,
        most_config_bytes: int = MOST_CONFIG_BYTES,
        identified: bool = False,
    ) -> None:
        self._agent = agent
        self._most_config_bytes = most_config_bytes
        self._mode = mode
        self._allowed = allowed
        self._identified = identified

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models with the state of each version."""
        return self._agent.index(ready_only)

    def load(self, name: str, parameters: Mapping[str, LoadParameter], may_upload: bool = True) -> None:
        """Loads or reloads a model and returns when it is ready.

        Args:
            name: Model name.
            parameters: Those of `ModelControl.load`.
            may_upload: True if the caller may send files or choose the environment.

        Raises:
            UnavailableError: The control mode or the operator forbids it.
            PermissionDeniedError: The caller may not upload.
            ConchError: The model can't be loaded; the text is Triton's.
        """
        self.check_changes()
        read_overrides(parameters, self._most_config_bytes)  # the size is checked before anything is parsed
        if not may_upload:
            code = code_of_load(parameters)
            if code:
                raise PermissionDeniedError(
                    f"the load request for model '{name}' brings {code}: that is taken from clients with a "
                    f"key of the access policy or of a restricted API, with a client certificate, or over a "
                    f"Unix socket; --allow-model-upload takes it from all clients"
                )
        self._agent.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; an unknown one is ignored.

        Raises:
            UnavailableError: The control mode or the operator forbids it.
        """
        self.check_changes()
        self._agent.unload(name, unload_dependents)

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a ready version, or removes it with None.

        Raises:
            UnavailableError: The control mode or the operator forbids it.
            ConchError: There is no such model, version or label, or a file declares the labels.
        """
        self.check_changes()
        self._agent.set_label(name, label, version)

    def check_changes(self) -> None:
        """Checks that clients may load, unload and label, before their request body is read.

        Raises:
            UnavailableError: The control mode or the operator forbids it.
        """
        if not self._loads_by_name:
            raise UnavailableError(
                f"explicit model load / unload is not allowed if polling is enabled; the model control mode "
                f"is '{self._mode}', and --model-control-mode=explicit allows it"
            )
        self._check_allowed()

    def check_rollout_changes(self) -> None:
        """Checks that clients may start and change rollouts: as loads, or if the operator says who may.

        Raises:
            UnavailableError: The control mode or the operator forbids it.
        """
        if not (self._loads_by_name or self._identified):
            raise UnavailableError(
                f"rollouts can't be changed on this port by clients that nothing identifies, as the model "
                f"control mode is '{self._mode}': --access-policy or "
                f"--http-restricted-api=model-repository:KEY=VALUE says who may, and "
                f"--model-control-mode=explicit allows it to all clients; conch rollout and rollout.toml "
                f"work in every mode"
            )
        self._check_allowed()

    @property
    def _loads_by_name(self) -> bool:
        return self._mode in ("explicit", "on-demand")

    def _check_allowed(self) -> None:
        """Raises UnavailableError: changes are for the control port only."""
        if not self._allowed:
            raise UnavailableError(
                "model load / unload is not allowed on this port: the server runs with "
                "--allow-model-control=false"
            )


def code_of_load(parameters: Mapping[str, LoadParameter]) -> str:
    """Part of a load request that selects code to run or files to write, in words; empty for none.

    A malformed config selects none, as its load fails.
    """
    file = next((key for key in parameters if key.startswith(FILE_PREFIX)), None)
    if file is not None:
        return f"a file ('{file}')"
    config = parameters.get(CONFIG)
    try:
        wanted = parse_override(config) if isinstance(config, str) else ModelConfig()
    except InvalidArgumentError:
        return ""
    return next(map(str, config_powers(wanted)), "")
