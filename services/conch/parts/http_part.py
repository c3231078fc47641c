"""A port that speaks HTTP as a part of the server: the REST port, or that of a platform."""

from __future__ import annotations

from conch.frontends.http.http_options import HttpOptions
from conch.frontends.http.http_server import HttpFrontEnd
from conch.parts.server_part import PartContext, Port
from conch.process.endpoint import security


class HttpPart(Port):
    """A port with routes of REST.

    Args:
        options: Its options.
        context: The server's objects for its parts.
        service: Its name in Triton's line of a started service.
    """

    for_clients = True

    def __init__(
        self,
        options: HttpOptions,
        context: PartContext,
        service: str = "HTTPService",
    ) -> None:
        scheme = "http://" if options.tls is None else "https://"
        super().__init__(options, context, security(options.tls), scheme)
        self.title = options.title
        self.service = service
        self._front_end = HttpFrontEnd(
            context.door,
            options,
            context.ports.loop,
            context.ports.reports,
            metrics=context.ports.metrics,
            access=context.access,
            fronts=context.ports.http_fronts,
            console_url=lambda: context.ports.url("Console"),
        )

    def check_models(self) -> None:
        """Checks the loaded models. Raises InvalidArgumentError: the platform can't call them."""
        self._front_end.check()

    def listen(self) -> int:
        """Starts the front end."""
        return self._front_end.start()

    def drain(self, grace_s: float) -> bool:
        """Refuses new connections; open ones are served on until `disconnect`."""
        return self._front_end.finish_begun(grace_s)

    def disconnect(self, grace_s: float) -> bool:
        """Refuses new requests, waits for those in flight, and closes."""
        return self._front_end.stop(grace_s)
