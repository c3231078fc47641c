"""`conch.Server`: a server inside a program, with functions as models.

Threads and locks: any thread may call it; `_lock` guards its stage, `_binding` serialises binding and start.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.registry import Registry
from conch.frontends.grpc.grpc_methods import GrpcMethods
from conch.process.main_thread import Signals, Task
from conch.server import InferenceServer
from conch_api.bound_classes import BoundClass, chat_class
from conch_api.composition import ServerSettings
from conch_api.decorators import Function
from conch_api.derivation import from_example, hinted_inputs, hinted_outputs
from conch_api.frame_examples import FRAME_ROWS
from conch_api.frames import is_frame
from conch_api.function_config import ModelConfig, Tensor
from conch_api.function_io import Result
from conch_api.function_repository import BoundModel, BoundRepository
from conch_api.in_process import InProcessRequests, Inputs, RequestOptions, Responses
from conch_api.input_readers import InputReader
from conch_api.server_keywords import ServerKeywords
from conch_control.lifecycle.model_definition import PollError

log = logging.getLogger(__name__)

_RUNNING: set[Server] = set()

Class = TypeVar("Class", bound=type[Any])


class _Stage(Enum):
    NEW = "has not been started"
    STARTING = "is starting"
    RUNNING = "runs"
    STOPPED = "has been stopped"


class Server:
    """A server in this process; thread-safe, and there may be several.

    It takes the flags of ``conch serve`` as keyword arguments with underscores: ``http_port=0``,
    ``model_control_mode="explicit"``, ``backend_config=["python,key=value"]``. Port 0 picks a free port, None
    opens none. Environment variables are ignored, and the program configures logging.

    A server can be started once; ``with`` starts and stops it. In an interactive session (a notebook),
    starting a server stops an earlier one with a common port.

    Args:
        repositories: Model repositories: directories or object store URLs; none to serve only functions.
        flags: The flags.

    Raises:
        FlagError: A flag is unknown or invalid.
    """

    def __init__(self, *repositories: str | Path, **flags: Unpack[ServerKeywords]) -> None:
        given = flags.pop("model_repository", None)
        more = [] if given is None else given if isinstance(given, list | tuple) else [given]
        self._settings = ServerSettings({**flags, "model_repository": [*repositories, *more]})
        self._bound = BoundRepository()
        self._lock = threading.Lock()  # guards the fields below
        self._stage = _Stage.NEW
        self._server: InferenceServer | None = None
        self._in_process: InProcessRequests | None = None
        self._wakers: list[Callable[[], None]] = []
        self._binding = threading.Lock()  # held while functions are bound or loaded at the start
        self._stack = ExitStack()
        self._stopped = threading.Event()
        self._finished = True

    def start(self) -> Server:
        """Loads the models and listens; returns when the server is ready.

        Raises:
            ConchError: A model cannot be loaded, a port is in use, or the server was stopped meanwhile;
                nothing is left running.
            RuntimeError: The server has been started before.
        """
        with self._binding:  # later binds load their models themselves
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
                    self._in_process = InProcessRequests(server.core)
                    self._stage = _Stage.RUNNING
                _RUNNING.add(self)
            except BaseException:  # raised again
                with self._lock:
                    # Once the server exists, `stop` cleans up.
                    theirs = self._stage is _Stage.STOPPED and self._server is not None
                    self._stage = _Stage.STOPPED
                if not theirs:
                    self._end()
                raise
        return self

    def _replace_earlier(self) -> None:
        """Stops servers with common ports in an interactive session, where a cell may run again."""
        if not hasattr(sys, "ps1"):  # not interactive: the program stops its servers itself
            return
        for other in list(_RUNNING):
            if self._settings.options.ports & other._settings.options.ports:
                log.info("stopping the server that was started before on the same ports")
                other.stop()

    @staticmethod
    def _start(server: InferenceServer) -> None:
        try:
            server.start()
        except InternalError as error:
            reasons = "; ".join(map(str, server.failures))
            raise InternalError(f"{error.message}: {reasons}" if reasons else error.message) from error

    def stop(self) -> bool:
        """Finishes running requests, unloads the models and closes the ports.

        Callable from any thread except those that run a bound function; a server that is still starting
        aborts. Streams that this thread reads end at once; other readers get an error if the server stops
        before their end.

        Returns:
            True if all requests finished within ``exit_timeout_secs``; also for a server that never started
            or has stopped.
        """
        with self._lock:
            stage, server = self._stage, self._server
            self._stage = _Stage.STOPPED
        if stage is _Stage.NEW:
            self._end()
        if stage is _Stage.STOPPED or server is None:
            self._stopped.wait()  # until the stop, or the aborted start, has finished
            return self._finished
        if self._in_process is not None:
            self._in_process.end_own_streams()
        try:
            self._finished = server.stop()
        finally:
            if self._in_process is not None:
                self._in_process.close()
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
        """Waits until the server has stopped; True if it has."""
        return self._stopped.wait(timeout)

    def serve(self) -> None:
        """Starts the server unless it runs, waits for a stop, and stops it.

        Prints models and addresses to standard error when it is ready. On the main thread SIGINT and SIGTERM
        stop it during this call, also while it starts, and a second signal ends the process; on other threads
        only `stop` does.

        Raises:
            ConchError: It cannot be started.
            RuntimeError: It has stopped already.
        """
        if threading.current_thread() is not threading.main_thread():
            self._start_if_new()
            self._announce()
            self._stopped.wait()
            return
        signals = Signals(logging.shutdown)
        with signals.caught(), self._waking(signals.wake):
            # On another thread: this one handles signals.
            start = Task("conch-start", self._start_if_new, signals.wake)
            signals.wait_for(lambda: start.ended or signals.asked)
            if not signals.asked:
                start.get()
                self._announce()
            signals.wait_for(lambda: signals.asked or self._stopped.is_set())
            stop = Task("conch-stop", self.stop, signals.wake)
            signals.wait_for(lambda: stop.ended)
            if stop.get():
                start.join()  # otherwise a hanging model load would block here

    def _start_if_new(self) -> None:
        if self._stage is _Stage.STOPPED:
            raise RuntimeError(f"the server {self._stage.value}; make another one")
        if self._stage is _Stage.NEW:
            self.start()

    def _announce(self) -> None:
        server = self._server
        if server is not None and self._stage is _Stage.RUNNING:
            sys.stderr.write(f"{server.announcement().text}\n")
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
        """The gRPC port; None without one."""
        return None if self._server is None else self._server.port("gRPC")

    @property
    def http_port(self) -> int | None:
        """The HTTP port; None without one."""
        return None if self._server is None else self._server.port("HTTP")

    @property
    def metrics_port(self) -> int | None:
        """The metrics port; None without one."""
        return None if self._server is None else self._server.port("Metrics")

    @property
    def grpc_url(self) -> str | None:
        """Local gRPC address such as ``127.0.0.1:8001``; None without one."""
        return self._url("gRPC")

    @property
    def http_url(self) -> str | None:
        """Local HTTP URL such as ``http://127.0.0.1:8000``; None without one."""
        return self._url("HTTP")

    @property
    def metrics_url(self) -> str | None:
        """Local URL of the metrics; None without one."""
        return self._url("Metrics")

    @property
    def console_url(self) -> str | None:
        """Local URL of the console; None without one."""
        return self._url("Console")

    def _url(self, service: str) -> str | None:
        return None if self._server is None else self._server.url(service) or None

    @property
    def ready(self) -> bool:
        """Server readiness, as clients see it."""
        return self._stage is _Stage.RUNNING and self._server is not None and self._server.core.serving

    @property
    def models(self) -> list[IndexEntry]:
        """The models with the states of their versions, as in the repository index."""
        return self._running().agent.index(False)

    def model_ready(self, name: str, version: str | int = "") -> bool:
        """Model readiness, as clients see it."""
        return self._running().core.model_ready(name, str(version or ""))

    @property
    def registry(self) -> Registry:
        """The versions that are ready, with their statistics."""
        return self._running().registry

    def grpc_methods(self) -> GrpcMethods:
        """Makes handlers of the protocol's RPCs, for a transport of the program instead of the gRPC port.

        They take and return messages as bytes; `conch_ray` is an example. The caller closes them after the
        stop.

        Raises:
            UnavailableError: The server does not run.
        """
        return self._running().grpc_methods()

    def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Loads or reloads a model in any model control mode; returns when it is ready.

        Args:
            name: Its name.
            config: A config in JSON that replaces the model's.
            files: With `config`, all files of the model by path.

        Raises:
            ConchError: It cannot be loaded; the version that served before still does.
        """
        parameters: dict[str, LoadParameter] = {} if config is None else {"config": config}
        parameters |= {f"file:{path}": content for path, content in (files or {}).items()}
        with _with_reasons():
            self._running().agent.load(name, parameters)

    def unload(self, name: str, dependents: bool = False) -> None:
        """Starts to unload a model; no error if it is not loaded.

        Args:
            name: Its name.
            dependents: True to unload models that were loaded only for this ensemble, too.
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
        example: Any = None,
    ) -> None:
        """Serves a function as a model; in a running server, returns when it is ready.

        Binding a name again replaces its function: the old one finishes running requests.

        Args:
            name: The model's name.
            function: Takes a list of `conch.Request` and returns a list of outputs; see `conch.batch` and
                `conch.sample` for functions of arrays. A coroutine function runs on an event loop of its
                instance. A list of functions makes as many instances, which run concurrently.
            inputs: Its inputs; by default from the example or the type hints.
            outputs: Its outputs; likewise.
            config: Its model configuration.
            version: The model's version.
            example: Arrays or lists by input, with the batch dimension where the model has one, or a frame
                of pandas, polars or pyarrow. Inputs that are not given have their types and dims; where the
                example has `str`, the function gets `str`. A frame makes an input of each column, and the
                function takes frames like it, unless a decorator such as `conch.batch` made it. If outputs
                are not given, the function is called once with the example and tells types and ranks; an
                output may have one value for each row.

        Raises:
            ConchError: The binding is invalid; the previous one stays.
        """
        functions: list[Any] = list(function) if isinstance(function, list | tuple) else [function]
        if not functions or not all(callable(each) for each in functions):
            raise InvalidArgumentError(f"model '{name}': a function, or a list of functions, must be bound")
        _check_name(name)
        if not isinstance(version, int) or version < 1:
            raise InvalidArgumentError(f"model '{name}': version must be a whole number above 0")
        config = config or ModelConfig(max_batch_size=FRAME_ROWS if is_frame(example) else 4)
        readers: Mapping[str, InputReader] = {}
        if example is not None:
            if inputs is not None and outputs is not None:
                raise InvalidArgumentError(
                    f"model '{name}': an example has no effect where inputs and outputs are given"
                )
            derived = from_example(name, functions, example, inputs, outputs, config.batching)
            inputs, outputs, readers = derived.inputs, derived.outputs, derived.readers
            functions = list(derived.functions)
            config = replace(config, parameters={**derived.parameters, **config.parameters})
        if inputs is None:
            inputs = hinted_inputs(name, functions[0], config.batching)
        if outputs is None:
            outputs = hinted_outputs(name, functions[0], config.batching)
        message = config.message(name, inputs, outputs, len(functions), version)
        self._put(BoundModel(message, functions, version, readers))

    def model(self, name: str) -> Callable[[Class], Class]:
        """Decorates a class as a model of this process, as `TritonPythonModel` in a repository is one.

        The class has `execute`, or methods such as `chat`; see docs/python-models.md.

        Args:
            name: The model's name.

        Raises:
            ConchError: The class is no model, or the name is invalid; what was bound before stays.
        """
        _check_name(name)

        def decorate(model_class: Class) -> Class:
            self._put(BoundClass(name, model_class))
            return model_class

        return decorate

    def chat(self, name: str) -> Callable[[Function], Function]:
        """Decorates a function, generator or coroutine function as a model with this method `chat`.

        Args:
            name: The model's name.

        Raises:
            ConchError: The name is invalid, or the model cannot be loaded.
        """
        _check_name(name)

        def decorate(function: Function) -> Function:
            self._put(BoundClass(name, chat_class(function)))
            return function

        return decorate

    def _put(self, model: BoundModel | BoundClass) -> None:
        """Binds a model; in a running server, returns when it is ready."""
        with self._binding:
            self._check_not_stopped()
            before = self._bound.put(model)
            if self._stage is _Stage.RUNNING and self._server is not None:
                with ExitStack() as undo, _with_reasons():
                    undo.callback(self._bound.restore, model, before)
                    self._server.agent.load(model.name, {})
                    undo.pop_all()

    def unbind(self, name: str) -> None:
        """Removes a function or class; running requests finish.

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
        """Runs a request on a model without copying the inputs.

        The inputs must not change until the outputs are returned.

        Args:
            model: The model's name.
            inputs: Arrays by name, with the batch dimension where the model has one.
            timeout: Time limit in seconds; None for no limit.
            options: Other options; see `RequestOptions`.

        Returns:
            The outputs by name; the arrays belong to the caller.

        Raises:
            ConchError: The error that a client would receive.
        """
        return self._in_process_requests().infer(model, inputs, timeout, options)

    async def infer_async(
        self, model: str, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Result:
        """As `infer`, without blocking the event loop."""
        return await self._in_process_requests().infer_async(model, inputs, timeout, options)

    def infer_frame(
        self, model: str, frame: Any, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Any:
        """Runs the rows of a frame on a model, in requests of at most its batch size, side by side.

        Args:
            model: The model's name.
            frame: A DataFrame of pandas or polars, a table of pyarrow, or a mapping of columns by name.
            timeout: Time limit of each request in seconds; None for no limit.
            options: Options of each request; see `RequestOptions`.

        Returns:
            The outputs as a frame of the same library, with the index of pandas.

        Raises:
            ConchError: The error that a client would receive, or that of a value that the model can't take:
                its text names column and row.
        """
        return self._in_process_requests().infer_frame(model, frame, timeout, options)

    async def infer_frame_async(
        self, model: str, frame: Any, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Any:
        """As `infer_frame`, without blocking the event loop while requests run."""
        return await self._in_process_requests().infer_frame_async(model, frame, timeout, options)

    def stream(
        self, model: str, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Responses:
        """As `infer`, for models with any number of responses; yields each as it arrives.

        The first `next` submits the request. Leaving the loop early, or ``close()``, cancels it. The model
        blocks while it is too far ahead of the loop. The timeout applies to each response.
        """
        return self._in_process_requests().stream(model, inputs, timeout, options)

    def stream_async(
        self, model: str, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Result]:
        """As `stream`, without blocking the event loop."""
        return self._in_process_requests().stream_async(model, inputs, timeout, options)

    def _check_not_stopped(self) -> None:
        if self._stage is _Stage.STOPPED:
            raise UnavailableError("the server has been stopped")

    def _running(self) -> InferenceServer:
        self._check_not_stopped()
        server = self._server
        if self._stage is not _Stage.RUNNING or server is None:
            raise UnavailableError(f"the server {self._stage.value}")
        return server

    def _in_process_requests(self) -> InProcessRequests:
        self._running()
        assert self._in_process is not None, "a server that runs has one"
        return self._in_process


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or "/" in name:
        raise InvalidArgumentError(f"{name!r} can't be the name of a model")


@contextmanager
def _with_reasons() -> Iterator[None]:
    """Adds the reason to errors, which clients do not see but a program's author needs."""
    try:
        yield
    except PollError as error:
        raise InvalidArgumentError(f"{error.message}: {error.reason}") from error
