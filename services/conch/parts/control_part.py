"""The control port as a part of the server."""

from __future__ import annotations

from conch.parts.server_part import PartContext, Port
from conch_control.remote_api.connection_options import ControlPortOptions
from conch_control.remote_api.server import ControlPort


class ControlPart(Port):
    """The control port: open before the models are loaded, so that clients can follow their loads.

    Raises:
        InvalidArgumentError: It would be open to everyone.
    """

    before_models = True
    title = "Control"

    def __init__(self, options: ControlPortOptions, context: PartContext) -> None:
        super().__init__(options, context, options.security)
        self._server = ControlPort(context.control.agent, options, access=context.access)

    def check(self) -> None:
        """Checks nothing: it listens before anything else takes time."""

    def listen(self) -> int:
        """Starts the server of the port."""
        return self._server.start()

    def refuse_changes(self) -> None:
        """Refuses changes, before the server stops."""
        self._server.refuse_changes()

    def close(self, grace_s: float) -> bool:
        """Ends all watches, last of all, so that operators can follow the stop."""
        return self._server.stop(grace_s)
