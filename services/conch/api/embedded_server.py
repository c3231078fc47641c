"""`conch.Server`: a whole server inside a program, and functions as models of it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from conch.api.composition import ServerSettings
from conch.api.decorators import Function
from conch.api.derivation import from_example, hinted_inputs, hinted_outputs
from conch.api.function_config import ModelConfig, Tensor
from conch.api.function_io import Result
from conch.api.function_repository import BoundModel, BoundRepository
from conch.api.in_process import InProcessRequests, Inputs, RequestOptions, Responses
from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.process.banner import local_address
from conch.process.main_thread import Signals, Task
from conch.server import Server as Composition
from conch_control.lifecycle.model_definition import PollError

log = logging.getLogger(__name__)

_RUNNING: set[Server] = set()


class _Stage(Enum):
    NEW = "has not been started"
    STARTING = "is starting"
    RUNNING = "runs"
    STOPPED = "has been stopped"


class Server:
    """A server in this process; any thread may use it, and there may be several.

    It takes the flags of ``conch serve`` by keyword, with underscores: ``http_port=0``,
    ``model_control_mode="explicit"``, ``backend_config=["python,key=value"]``. A port of 0 is a free one, and
    one of None is not opened. Environment variables are not looked at, and logging belongs to the program.

    A server can be started once. ``with`` starts and stops it. In a notebook, or another interactive session,
    a server that is started takes the place of one that has a port in common with it.

    Args:
        repositories: Model repositories: directories, or URLs of object stores; none for functions alone.
        flags: The flags.

    Raises:
        FlagError: A flag is unknown or wrong.
    """

    def __init__(self, *repositories: str | Path, **flags: Any) -> None:
        given = flags.pop("model_repository", None)
        more = [] if given is None else given if isinstance(given, list | tuple) else [given]
        self._settings = ServerSettings({**flags, "model_repository": [*repositories, *more]})
        self._bound = BoundRepository()
        self._lock = threading.Lock()  # guards what follows
        self._stage = _Stage.NEW
        self._server: Composition | None = None
        self._direct: InProcessRequests | None = None
        self._wakers: list[Callable[[], None]] = []
        self._binding = threading.Lock()  # held while functions are bound, or all of them loaded
        self._stack = ExitStack()
        self._stopped = threading.Event()
        self._finished = True

    def start(self) -> Server:
        """Loads the models and listens; returns the server when it is ready for requests.

        Raises:
            ConchError: A model can't be loaded, or a port is taken, or the server was stopped meanwhile;
                nothing is left running.
            RuntimeError: The server has been started before.
        """
        with self._binding:  # what is bound from here on is loaded by who binds it
            with self._lock:
                if self._stage is not _Stage.NEW:
                    raise RuntimeError(f"the server {self._stage.value}; make another one")
                self._stage = _Stage.STARTING
            try:
                self._replace_earlier()
                server = self._settings.compose(self._bound, self._stack)
                with self._lock:
                    self._check_not_stopped()
                    self._server = server
                self._start(server)
                with self._lock:
                    self._check_not_stopped()
                    self._direct = InProcessRequests(server.core)
                    self._stage = _Stage.RUNNING
                _RUNNING.add(self)
            except BaseException:
                with self._lock:
                    # Once there is a server, who stops it sees to everything.
                    theirs = self._stage is _Stage.STOPPED and self._server is not None
                    self._stage = _Stage.STOPPED
                if not theirs:
                    self._end()
                raise
        return self

    def _replace_earlier(self) -> None:
        """Stops servers of this session that have the same ports: a cell or a line was run again."""
        if not hasattr(sys, "ps1"):  # a program, which stops its servers itself
            return
        for other in list(_RUNNING):
            if self._settings.ports & other._settings.ports:
                log.info("stopping the server that was started before on the same ports")
                other.stop()

    @staticmethod
    def _start(server: Composition) -> None:
        try:
            server.start()
        except InternalError as error:
            reasons = "; ".join(map(str, server.failures))
            raise InternalError(f"{error.message}: {reasons}" if reasons else error.message) from error

    def stop(self) -> bool:
        """Finishes the requests that there are, unloads the models and gives the ports back.

        From any thread but those that run a function of it; a server that still starts gives that up. Streams
        that this thread reads are ended at once. Who still waits in the end is told that it has been stopped.

        Returns:
            Whether all requests were finished within ``exit_timeout_secs``. Also for a server that was not
            started, or is stopped already.
        """
        with self._lock:
            stage, server = self._stage, self._server
            self._stage = _Stage.STOPPED
        if stage is _Stage.NEW:
            self._end()
        if stage is _Stage.STOPPED or server is None:
            self._stopped.wait()  # until whoever stops it, or gives its start up, has done so
            return self._finished
        if self._direct is not None:
            self._direct.end_own_streams()
        try:
            self._finished = server.stop()
        finally:
            if self._direct is not None:
                self._direct.close()
            self._end()
        return self._finished

    def _end(self) -> None:
        _RUNNING.discard(self)
        self._stack.close()
        with self._lock:
            self._stopped.set()
            for wake in self._wakers:
                wake()

    def __enter__(self) -> Server:
        self._start_if_new()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server is stopped; returns whether it is."""
        return self._stopped.wait(timeout)

    def serve(self) -> None:
        """Starts the server if it has not been, waits until something stops it, and stops it.

        Once it serves, its models and addresses are printed to standard error.

        On the main thread SIGINT and SIGTERM stop it for as long as this waits, also while it starts, and a
        second one ends the process; on others only `stop` does.

        Raises:
            ConchError: It can't be started.
            RuntimeError: It has been stopped already.
        """
        if threading.current_thread() is not threading.main_thread():
            self._start_if_new()
            self._announce()
            self._stopped.wait()
            return
        signals = Signals(logging.shutdown)
        with signals.caught(), self._waking(signals.wake):
            # Not here, where signals are answered.
            start = Task("conch-start", self._start_if_new, signals.wake)
            signals.wait_for(lambda: start.ended or signals.asked)
            if not signals.asked:
                start.get()
                self._announce()
            signals.wait_for(lambda: signals.asked or self._stopped.is_set())
            stop = Task("conch-stop", self.stop, signals.wake)
            signals.wait_for(lambda: stop.ended)
            if stop.get():
                start.join()  # else it may hang with the model that it loads

    def _start_if_new(self) -> None:
        if self._stage is _Stage.STOPPED:
            raise RuntimeError(f"the server {self._stage.value}; make another one")
        if self._stage is _Stage.NEW:
            self.start()

    def _announce(self) -> None:
        server = self._server
        if server is not None and self._stage is _Stage.RUNNING:
            sys.stderr.write(f"{server.banner()}\n")
            sys.stderr.flush()

    def __repr__(self) -> str:
        server = self._server
        if server is None or self._stage is not _Stage.RUNNING:
            return f"<conch.Server that {self._stage.value}>"
        places = ", ".join(f"{each.service} {each.url}" for each in server.endpoints) or "no ports"
        entries = sorted(server.registry.entries.items())
        models = [
            f"{name} ({', '.join(map(str, sorted(each.ready)))})" for name, each in entries if each.ready
        ]
        return f"<conch.Server that runs: {places}; models: {', '.join(models) or 'none'}>"

    @contextmanager
    def _waking(self, wake: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._wakers.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakers.remove(wake)

    @property
    def grpc_port(self) -> int | None:
        """The port that gRPC is served on; None for none."""
        return None if self._server is None else self._server.grpc_port

    @property
    def http_port(self) -> int | None:
        """The port that REST is served on; None for none."""
        return None if self._server is None else self._server.http_port

    @property
    def metrics_port(self) -> int | None:
        """The port that metrics are served on; None for none."""
        return None if self._server is None else self._server.metrics_port

    @property
    def grpc_url(self) -> str | None:
        """Where clients of this machine find gRPC, such as ``127.0.0.1:8001``; None for nowhere."""
        options = self._settings.grpc
        if options is None or self.grpc_port is None:
            return None
        return (
            options.target
            if options.address.startswith("unix:")
            else local_address(options.address, self.grpc_port)
        )

    @property
    def http_url(self) -> str | None:
        """Where clients of this machine find REST, such as ``http://127.0.0.1:8000``; None for nowhere."""
        options = self._settings.http
        if options is None or self.http_port is None:
            return None
        return f"http{'s' if options.tls else ''}://{local_address(options.address, self.http_port)}"

    @property
    def metrics_url(self) -> str | None:
        """Where clients of this machine find the metrics; None for nowhere."""
        options = self._settings.metrics
        if options is None or self.metrics_port is None:
            return None
        scheme = "https" if options.tls else "http"
        return f"{scheme}://{local_address(options.address, self.metrics_port)}/metrics"

    @property
    def ready(self) -> bool:
        """Whether it is to be sent requests, as clients are told."""
        return self._stage is _Stage.RUNNING and self._server is not None and self._server.core.serving

    @property
    def models(self) -> list[IndexEntry]:
        """The models with the states of their versions, as in the repository index."""
        return self._running().agent.index(False)

    def model_ready(self, name: str, version: str | int = "") -> bool:
        """Whether a model is to be sent requests."""
        return self._running().core.model_ready(name, str(version or ""))

    def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Loads or reloads a model, and returns when it is ready; in any mode.

        Args:
            name: Its name.
            config: A config in JSON to use in place of the model's.
            files: With it, all files of the model by path.

        Raises:
            ConchError: It can't be loaded; what served before still does.
        """
        parameters: dict[str, LoadParameter] = {} if config is None else {"config": config}
        parameters |= {f"file:{path}": content for path, content in (files or {}).items()}
        with _reasons():
            self._running().agent.load(name, parameters)

    def unload(self, name: str, dependents: bool = False) -> None:
        """Begins to unload a model; one that is not loaded is no error.

        Args:
            name: Its name.
            dependents: Also unload the models of an ensemble that were loaded for it only.
        """
        self._running().agent.unload(name, dependents)

    def bind(
        self,
        name: str,
        function: Function | Sequence[Function],
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        config: ModelConfig | None = None,
        *,
        version: int = 1,
        example: Inputs | None = None,
    ) -> None:
        """Makes a function a model; in a running server, returns when it is ready.

        Binding a name again replaces its function: requests that run are finished by the old one.

        Args:
            name: The model's name.
            function: Takes a list of `conch.Request` and returns a list of outputs; see `conch.batch` and
                `conch.sample` for functions of arrays. A coroutine function runs on an event loop of its
                instance. A list of functions has as many instances, which run side by side.
            inputs: What it takes; without, what an example or the function's type hints say.
            outputs: What it returns; likewise.
            config: How it is served.
            version: The model's version.
            example: Arrays by input, with the batch dimension where the model has one: the function is called
                once with them to learn the inputs and outputs that are not given.

        Raises:
            ConchError: Something is wrong with it; what was bound before stays.
        """
        functions: list[Any] = list(function) if isinstance(function, list | tuple) else [function]
        if not functions or not all(callable(each) for each in functions):
            raise InvalidArgumentError(f"model '{name}': a function, or a list of functions, must be bound")
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or "/" in name:
            raise InvalidArgumentError(f"{name!r} can't be the name of a model")
        if not isinstance(version, int) or version < 1:
            raise InvalidArgumentError(f"model '{name}': version must be a whole number above 0")
        config = config or ModelConfig()
        if example is not None:
            if inputs is not None and outputs is not None:
                raise InvalidArgumentError(
                    f"model '{name}': an example has no effect where inputs and outputs are given"
                )
            inputs, outputs = from_example(name, functions[0], example, inputs, outputs, config.batching)
        if inputs is None:
            inputs = hinted_inputs(name, functions[0], config.batching)
        if outputs is None:
            outputs = hinted_outputs(name, functions[0], config.batching)
        message = config.message(name, inputs, outputs, len(functions), version)
        model = BoundModel(message, functions, version)
        with self._binding:
            self._check_not_stopped()
            before = self._bound.put(model)
            if self._stage is _Stage.RUNNING and self._server is not None:
                try:
                    with _reasons():
                        self._server.agent.load(name, {})
                except BaseException:
                    self._bound.restore(model, before)
                    raise

    def unbind(self, name: str) -> None:
        """Takes a function out of service; requests that run are finished.

        Raises:
            InvalidArgumentError: The name has none.
        """
        with self._binding:
            self._bound.remove(name)
            if self._stage is _Stage.RUNNING and self._server is not None:
                self._server.agent.unload(name, False)

    def infer(
        self, model: str, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Result:
        """Runs a request on a model, without a client and without a copy of the inputs.

        The inputs must stay as they are until the outputs are there.

        Args:
            model: The model's name.
            inputs: Arrays by name, with the batch dimension where the model has one.
            timeout: Seconds that it may take; None for any time.
            options: What else there is to say; see `RequestOptions`.

        Returns:
            The outputs by name; the arrays are the caller's.

        Raises:
            ConchError: What a client would be told.
        """
        return self._way_in().infer(model, inputs, timeout, options)

    async def infer_async(
        self, model: str, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Result:
        """As `infer`, without blocking the event loop."""
        return await self._way_in().infer_async(model, inputs, timeout, options)

    def stream(
        self, model: str, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Responses:
        """As `infer`, for models with any number of responses: gives each as it comes.

        The request begins when the first is asked for. A loop that is left early cancels it, as does
        ``close()``. A model that is ahead of the loop waits for it. The timeout is that of each response.
        """
        return self._way_in().stream(model, inputs, timeout, options)

    def stream_async(
        self, model: str, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Result]:
        """As `stream`, without blocking the event loop."""
        return self._way_in().stream_async(model, inputs, timeout, options)

    def _check_not_stopped(self) -> None:
        if self._stage is _Stage.STOPPED:
            raise UnavailableError("the server has been stopped")

    def _running(self) -> Composition:
        self._check_not_stopped()
        server = self._server
        if self._stage is not _Stage.RUNNING or server is None:
            raise UnavailableError(f"the server {self._stage.value}")
        return server

    def _way_in(self) -> InProcessRequests:
        self._running()
        assert self._direct is not None, "a server that runs has one"
        return self._direct


@contextmanager
def _reasons() -> Iterator[None]:
    """Has errors say what clients are not told, but a program's author wants to know."""
    try:
        yield
    except PollError as error:
        raise InvalidArgumentError(f"{error.message}: {error.reason}") from error
