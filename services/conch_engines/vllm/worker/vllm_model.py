"""One instance: an engine, its event loop, and what responds to requests.

The engine is another process; its client and all requests live in the event loop of one thread, which
nothing may block. If the engine dies, this process ends: the server then fails the running requests as
unavailable, and starts another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import uuid
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from .answer import VllmAnswer
from .engine_metrics import EngineMetrics
from .engine_setup import (
    VERSIONS,
    AbsentError,
    Engine,
    SetupError,
    choose_devices,
    find,
    import_vllm,
    is_tested,
)
from .native_routes import NativeRoutes
from .text_requests import Inputs, embed, error_code, generate, warm_up
from .vllm_files import FileError, ModelFiles

_ENGINE_DIED = 70
"""Exit status of a worker whose engine has ended."""

_SWITCH_S = 0.0002
_WATCH_S = 0.5
_METRICS_S = 5.0
_ABORT_S = 10.0
"""Time that aborted requests have to end when the model is unloaded."""
_SLOW_CLIENTS = 64
"""Clients that read slowly and can be waited for at the same time."""
_ROUTE = "openai_route"
_FALSE = ("false", "off", "0")


class TritonPythonModel:
    """One instance."""

    answers_later = True

    def initialize(self, args: dict[str, str]) -> None:
        """Starts the engine."""
        config = json.loads(args["model_config"])
        parameters = {
            key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()
        }
        self._name = args["model_name"]
        self._requests: set[asyncio.Task[None]] = set()
        self._closing = False
        self._over = threading.Event()
        try:
            files = ModelFiles.read(Path(pb_utils.get_model_dir()))
            choose_devices(
                args["model_instance_kind"],
                int(args["model_instance_device_id"]),
                parameters.get("GPU_DEVICE_IDS", ""),
                files.engine,
                _listed_gpus(config),
            )
            vllm = import_vllm()
            aliases = tuple(filter(None, map(str.strip, parameters.get("served_model_name", "").split(","))))
            self._engine = Engine(self._name, files, aliases)
            self._loop = _new_loop()
            self._threads = ThreadPoolExecutor(_SLOW_CLIENTS, thread_name_prefix=f"conch-{self._name}-send")
            self._thread = threading.Thread(
                target=self._run_loop, name=f"conch-{self._name}-engine", daemon=True
            )
            # The engine's loop is seldom idle: the thread that takes requests would wait 5 ms for each turn.
            sys.setswitchinterval(_SWITCH_S)
            self._thread.start()
            self._native: NativeRoutes | None = None
            native = parameters.get("CONCH_VLLM_NATIVE", "true").strip().lower() not in _FALSE
            self._wait(self._start(native, vllm.__version__))
        except (FileError, SetupError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        except Exception as error:  # boundary: vLLM, for whatever is wrong with the model or the machine
            raise pb_utils.TritonModelException(f"vLLM can't start the engine: {_text(error)}") from error
        self._metrics = self._open_metrics(args)

    def execute(self, requests: list[Any]) -> None:
        """Starts requests."""
        for request in requests:
            self._loop.call_soon_threadsafe(self._begin, request, request.get_response_sender())

    def is_ready(self) -> bool:
        """True if the engine is alive."""
        return not self._engine.dead

    def finalize(self) -> None:
        """Aborts requests that still run, and ends the engine."""
        self._over.set()
        self._wait(self._abort_all())
        if self._metrics is not None:
            self._metrics.forward()
        self._engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- the event loop -----------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self, native: bool, version: str) -> None:
        engine = self._engine
        routes = None
        if native:
            if is_tested(version):
                try:
                    routes = NativeRoutes(engine)
                except AbsentError as error:
                    pb_utils.Logger.log_warn(f"model '{self._name}' has no OpenAI routes of vLLM: {error}")
            else:
                first, last = (".".join(map(str, each)) for each in VERSIONS)
                pb_utils.Logger.log_warn(
                    f"vLLM {version} is outside of the tested versions {first} to {last}: model "
                    f"'{self._name}' has no OpenAI routes of vLLM, only text_input and text_output"
                )
        await engine.start()
        if "generate" in engine.tasks:
            await warm_up(engine)
        if routes is not None:
            await routes.open()
        self._native = routes
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._engine.dead:
                self._die()

    def _die(self) -> None:
        """Ends the process: the engine's other processes are killed with its group."""
        if self._closing:
            return
        sys.stderr.write(f"vLLM's engine of model '{self._name}' has died; its worker ends with it\n")
        sys.stderr.flush()
        os._exit(_ENGINE_DIED)

    async def _abort_all(self) -> None:
        self._closing = True
        self._watching.cancel()
        for task in self._requests:
            task.cancel()
        if self._requests:
            await asyncio.wait(self._requests, timeout=_ABORT_S)

    # --- requests -----------------------------------------------------------------------------------------

    def _begin(self, request: Any, sender: Any) -> None:
        parameters = json.loads(request.parameters())
        gone = asyncio.Event()
        answer = VllmAnswer(sender, self._threads)
        task = self._loop.create_task(self._serve(request, parameters, answer, gone))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        # vLLM's application aborts a request whose client leaves, its engine one whose task is cancelled.
        leave = gone.set if _ROUTE in parameters else task.cancel
        sender.on_cancel(lambda: self._loop.call_soon_threadsafe(leave))

    async def _serve(
        self, request: Any, parameters: dict[str, Any], answer: VllmAnswer, gone: asyncio.Event
    ) -> None:
        errors = pb_utils.TritonError
        try:
            await self._respond(request, parameters, answer, gone)
        except asyncio.CancelledError:
            if self._closing:
                await answer.fail("the model is unloaded", errors.UNAVAILABLE)
        except _UnsupportedError as error:
            await answer.fail(str(error), errors.UNSUPPORTED)
        except Exception as error:  # boundary: vLLM, which may raise anything for one request
            if self._engine.dead:
                self._die()
            what = "vLLM" if _ROUTE in parameters else "Error generating stream"
            await answer.fail(f"{what}: {_text(error)}", error_code(error))
        if not answer.ended:
            if self._engine.dead:
                self._die()
            await answer.fail("Request was cancelled", errors.CANCELLED)

    async def _respond(
        self, request: Any, parameters: dict[str, Any], answer: VllmAnswer, gone: asyncio.Event
    ) -> None:
        engine = self._engine
        # Unique, as vLLM wants it: a client may use an id twice at a time.
        request_id = f"{request.request_id() or 'conch'}-{uuid.uuid4().hex[:16]}"
        inputs = Inputs(request)
        route = parameters.get(_ROUTE)
        if route is not None:
            if self._native is None:
                raise _UnsupportedError(
                    f"model '{self._name}' has no OpenAI routes of vLLM; with parameter 'CONCH_VLLM_NATIVE' "
                    f"false it is called through text_input and text_output"
                )
            if not self._native.has(route):
                raise _UnsupportedError(f"model '{self._name}' has no route '{route}'")
            body = inputs.raw("text_input") or b""
            await self._native.serve(route, body, request_id, answer, gone)
            return
        wanted = inputs.object("embedding_request")
        if wanted is not None:
            await embed(engine, request_id, wanted, answer)
        else:
            await generate(engine, request_id, inputs, parameters, answer)

    # --- metrics ------------------------------------------------------------------------------------------

    def _open_metrics(self, args: dict[str, str]) -> EngineMetrics | None:
        if self._engine.arguments.disable_log_stats:
            return None
        registry = find("vllm.v1.metrics.prometheus:get_prometheus_registry")
        if registry is None:
            pb_utils.Logger.log_warn(f"vLLM's metrics of model '{self._name}' are not forwarded: it has none")
            return None
        metrics = EngineMetrics(registry(), {"model": self._name, "version": args["model_version"]})
        metrics.forward()

        def repeat() -> None:
            while not self._over.wait(_METRICS_S):
                metrics.forward()

        threading.Thread(target=repeat, name=f"conch-{self._name}-metrics", daemon=True).start()
        return metrics


def _listed_gpus(config: dict[str, Any]) -> tuple[int, ...]:
    """The GPUs of the only instance group, if it has kind MODEL."""
    groups = config.get("instance_group", [])
    if len(groups) != 1 or groups[0].get("kind") != "KIND_MODEL":
        return ()
    return tuple(int(each) for each in groups[0].get("gpus", ()))


class _UnsupportedError(Exception):
    """The request's way is not there."""


def _text(error: Exception) -> str:
    """The text of an error, or of the one behind it: vLLM wraps unexpected ones without a text."""
    return str(error) or str(error.__cause__ or "") or type(error).__name__


def _new_loop() -> asyncio.AbstractEventLoop:
    make = find("uvloop:new_event_loop")  # vLLM brings it
    loop: asyncio.AbstractEventLoop = asyncio.new_event_loop() if make is None else make()
    return loop
