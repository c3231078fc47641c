"""What the data port may ask of the agent: as much as the model control mode lets clients do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from conch.core.errors import PermissionDeniedError, UnavailableError
from conch.core.server_state import IndexEntry, LoadParameter, RepositoryAgent
from conch_control.lifecycle.load_overrides import brought_code
from conch_control.options import ControlMode


class ForModels:
    """The agent as models see it.

    A load that a model asks for in its `initialize` runs while that model's own load goes on, and must not
    wait for its end to get its turn.

    Args:
        agent: The agent.

    Attributes:
        around_loads: Makes room for one more load.
    """

    def __init__(self, agent: RepositoryAgent) -> None:
        self._agent = agent
        self.around_loads: Callable[[], AbstractContextManager[object]] = nullcontext

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """See `RepositoryAgent.index`."""
        return self._agent.index(ready_only)

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """See `RepositoryAgent.load`."""
        with self.around_loads():
            self._agent.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """See `RepositoryAgent.unload`."""
        self._agent.unload(name, unload_dependents)


class Gate:
    """The agent as front ends see it; a `conch.core.server_state.ClientAgent`.

    Args:
        agent: The agent.
        mode: The model control mode; only in ``explicit`` clients decide what is loaded.
        allowed: Whether clients of the data port may; else only those of the control port.
    """

    def __init__(self, agent: RepositoryAgent, mode: ControlMode, allowed: bool = True) -> None:
        self._agent = agent
        self._mode = mode
        self._allowed = allowed

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models of the repositories with the state of each version."""
        return self._agent.index(ready_only)

    def load(self, name: str, parameters: Mapping[str, LoadParameter], may_upload: bool = True) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Args:
            name: Model name.
            parameters: See `RepositoryAgent.load`.
            may_upload: Whether the caller may bring files, or choose the environment that they run in.

        Raises:
            UnavailableError: The control mode or the operator does not allow it.
            PermissionDeniedError: The caller does what it may not.
            ConchError: The model can't be loaded; the text is Triton's.
        """
        self.check_changes()
        if not may_upload:
            code = brought_code(parameters)
            if code:
                raise PermissionDeniedError(
                    f"the load request for model '{name}' brings {code}: that is taken from clients on this "
                    f"machine, and from those with a client certificate or the key of a restricted API; "
                    f"--allow-model-upload takes it from all clients"
                )
        self._agent.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; one that is not loaded is no error.

        Raises:
            UnavailableError: The control mode or the operator does not allow it.
        """
        self.check_changes()
        self._agent.unload(name, unload_dependents)

    def check_changes(self) -> None:
        """Checks that clients may load and unload, before anything is read that they send.

        Raises:
            UnavailableError: The control mode or the operator does not allow it.
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
