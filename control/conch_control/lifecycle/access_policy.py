"""Access policies for model control: what clients and models may ask of the agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from conch.core.errors import PermissionDeniedError, UnavailableError
from conch.core.model_control import IndexEntry, LoadParameter, ModelControl
from conch_control.control_options import MOST_CONFIG_BYTES, ControlMode
from conch_control.lifecycle.load_overrides import read_overrides, uploaded_code


class ModelFacingAgent:
    """The agent as models see it.

    A load requested in a model's `initialize` runs inside that model's own load, so it needs an extra
    slot.
    """

    def __init__(self, agent: ModelControl) -> None:
        self._agent = agent
        self.extra_slot: Callable[[], AbstractContextManager[object]] = nullcontext

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models with the state of each version."""
        return self._agent.index(ready_only)

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads a model in an extra slot of the load queue."""
        with self.extra_slot():
            self._agent.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model."""
        self._agent.unload(name, unload_dependents)


class GuardedAgent:
    """The agent as front ends see it; a `conch.core.model_control.ClientModelControl`.

    Changes need mode ``explicit``, and are for the control port only unless `allowed`.
    """

    def __init__(
        self,
        agent: ModelControl,
        mode: ControlMode,
        allowed: bool = True,
        most_config_bytes: int = MOST_CONFIG_BYTES,
    ) -> None:
        self._agent = agent
        self._most_config_bytes = most_config_bytes
        self._mode = mode
        self._allowed = allowed

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
            code = uploaded_code(parameters)
            if code:
                raise PermissionDeniedError(
                    f"the load request for model '{name}' brings {code}: that is taken from clients on this "
                    f"machine, and from those with a client certificate or the key of a restricted API; "
                    f"--allow-model-upload takes it from all clients"
                )
        self._agent.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; an unknown one is ignored.

        Raises:
            UnavailableError: The control mode or the operator forbids it.
        """
        self.check_changes()
        self._agent.unload(name, unload_dependents)

    def check_changes(self) -> None:
        """Checks that clients may load and unload, before their request body is read.

        Raises:
            UnavailableError: The control mode or the operator forbids it.
        """
        if self._mode != "explicit":
            raise UnavailableError(
                f"explicit model load / unload is not allowed if polling is enabled; the model control mode "
                f"is '{self._mode}', and --model-control-mode=explicit allows it"
            )
        if not self._allowed:
            raise UnavailableError(
                "model load / unload is not allowed on this port: the server runs with "
                "--allow-model-control=false"
            )
