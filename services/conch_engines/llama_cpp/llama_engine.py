"""The engine of a model: llama.cpp's server in this process, and the requests that run in it.

A call of the engine blocks its thread until its answer ends, so each slot has a thread; further requests wait
on the event loop, where they are cancelled without the engine. The engine calls back for each piece of an
answer, on the slot's thread: the piece goes into an inbox, and the first one of a turn wakes the loop, which
gives all pieces of a step to their requests at once. The callback returns true to cancel. It is also called
between the batches of a long prompt, as progress is asked for. It must not raise: the engine would cancel the
request, and lose the exception.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.temporary_folder import TemporaryFolder
from conch_engines.llama_cpp.constraints import Constraint
from conch_engines.llama_cpp.engine_log import reported
from conch_engines.llama_cpp.engine_socket import EngineSocket
from conch_engines.llama_cpp.llama_library import xllamacpp
from conch_engines.llama_cpp.llama_sampling import Sampling
from conch_engines.llama_cpp.llama_settings import LlamaSettings
from conch_engines.llama_cpp.token_logprobs import LogprobsForm
from conch_llm.deltas import Delta

log = logging.getLogger(__name__)

_ERRORS_ONLY = 1
_HTTP_THREADS = 2
_UNCAUGHT = (RuntimeError, ValueError)
"""Exceptions of the engine's calls about a request."""


def server_parameters(path: Path, settings: LlamaSettings, context_length: int, socket: Path) -> Any:
    """Parameters of an engine.

    Args:
        path: The GGUF file.
        settings: The model's settings.
        context_length: Most tokens of one request.
        socket: The socket of the engine's own routes.
    """
    found = xllamacpp.CommonParams()
    found.model.path = str(path)
    found.n_parallel = settings.max_num_seqs
    found.n_ctx = context_length * settings.max_num_seqs  # the slots share it
    found.n_batch = found.n_ubatch = settings.max_num_batched_tokens
    found.n_gpu_layers = settings.n_gpu_layers
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = settings.threads
    found.n_threads_http = _HTTP_THREADS
    found.hostnames = [str(socket)]
    found.port = 0
    found.ui = False
    found.verbosity = _ERRORS_ONLY
    found.fit_params = False  # it would shorten the context
    found.cache_ram_mib = 0  # beside the slots' own, up to 8 GiB
    found.warmup = False  # the server warms up
    return found


class _Answer:
    """One running request; deltas wait in `ready` until its task takes them."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None, form: LogprobsForm) -> None:
        self.ready: list[Delta] = []
        self.failure: ConchError | None = None
        self.over = False
        self.cancelled = False
        self._with_logprobs = sampling.logprobs is not None
        self._form = form
        self._constraint = constraint
        self._tokens = 0
        self._begun = False
        self._wakes: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Waits until there is something."""
        if not self.ready and self.failure is None and not self.over:
            self._wakes = asyncio.get_running_loop().create_future()
            await self._wakes

    def wake(self) -> None:
        """Ends the wait."""
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    def fail(self, error: ConchError) -> None:
        """Ends the answer with an error, unless it has ended."""
        if self.failure is None and not self.over:
            self.failure = error
        self.cancelled = True

    def take(self, text: str) -> None:
        """Takes a piece of the engine."""
        piece = json.loads(text)
        if "error" in piece:
            self.fail(_error(piece["error"]))
            return
        timings = piece["timings"]
        if "prompt_progress" in piece:
            return
        (choice,) = piece["choices"]
        tokens = timings["predicted_n"] - self._tokens
        self._tokens += tokens
        ends = choice["finish_reason"] is not None
        if self._constraint is not None:
            self._constraint.take(choice["text"], ends and choice["finish_reason"] == "stop")
        self.ready.append(
            Delta(
                choice["text"],
                finish_reason=choice["finish_reason"],
                tokens=tokens,
                logprobs=self._form(choice["logprobs"]["content"])
                if self._with_logprobs and choice["logprobs"] is not None
                else None,
                prompt_tokens=None if self._begun else timings["cache_n"] + timings["prompt_n"],
                cached_tokens=None if self._begun else timings["cache_n"],
            )
        )
        self._begun = True
        self.over = ends


class Engine:
    """One model.

    Args:
        name: The model's name.
        path: Its GGUF file.
        settings: The engine's settings.
        context_length: Most tokens of one request.
        adapters: Files of LoRA adapters by name.
        report: Gets the numbers of running and of waiting requests when they change.

    Attributes:
        context_length: Most tokens of one request.
        vocabulary: Number of tokens.

    Raises:
        InvalidArgumentError: The engine can't load the file.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        settings: LlamaSettings,
        context_length: int,
        adapters: dict[str, Path] | None = None,
        report: Callable[[int, int], None] = lambda running, waiting: None,
    ) -> None:
        self._name = name
        self._report = report
        self._cache_prompt = settings.enable_prefix_caching
        self._adapters = list(adapters or {})
        self.context_length = context_length
        with ExitStack() as stack:
            socket = stack.enter_context(TemporaryFolder("conch-llama-")) / "engine.sock"
            parameters = server_parameters(path, settings, context_length, socket)
            if adapters:
                parameters.lora_adapters = [_adapter(file) for file in adapters.values()]
                parameters.lora_init_without_apply = True
            with reported(f"'{path}'"):
                self._server: Any = xllamacpp.Server(parameters)
            self._directory = stack.pop_all()
        self._socket = EngineSocket(socket)
        facts = self._socket.facts()
        self.vocabulary: int = facts["meta"]["n_vocab"]
        props = self._socket.call("/props")
        held = props["default_generation_settings"]["n_ctx"]
        if held < context_length:
            self._directory.close()
            raise InvalidArgumentError(f"the engine holds requests of {held} tokens, not of {context_length}")
        self._special = {key: props[key] for key in ("bos_token", "eos_token")}
        self._pool = ThreadPoolExecutor(settings.max_num_seqs, "conch-llama")
        self._free = asyncio.Semaphore(settings.max_num_seqs)
        self._inbox: deque[tuple[_Answer, str]] = deque()
        self._awake = False
        self._answers: set[_Answer] = set()
        self._waiting = 0

    def special_tokens(self) -> dict[str, str]:
        """The tokens that chat templates name, ``bos_token`` and ``eos_token``."""
        return self._special

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a text."""
        if not text:
            return []
        body = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        ids: list[int] = (await self._call("/tokenize", body))["tokens"]
        return ids

    async def pieces(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """The tokens of a text, and the text of each by itself; parts of characters are U+FFFD."""
        if not text:
            return [], []
        body = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        found = (await self._call("/tokenize", {**body, "with_pieces": True}))["tokens"]
        return [each["id"] for each in found], [_text(each["piece"]) for each in found]

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included. Raises InvalidArgumentError: one is none."""
        self.check_tokens("tokens", ids)
        text: str = (await self._call("/detokenize", {"tokens": list(ids)}))["content"] if ids else ""
        return text

    def check_tokens(self, name: str, ids: Sequence[int]) -> None:
        """Raises InvalidArgumentError: an id is no token; the text names the field."""
        for position, each in enumerate(ids):
            if not 0 <= each < self.vocabulary:
                raise InvalidArgumentError(f"{name}[{position}]: {each} is no token of the model's tokenizer")

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int | None,
        sampling: Sampling,
        form: LogprobsForm,
    ) -> AsyncGenerator[Delta, None]:
        """Answers a prompt; closing the generator ends the request.

        Raises:
            ConchError: The prompt or the constraint is refused, or the engine fails.
        """
        room = self._room(len(prompt))
        loop = asyncio.get_running_loop()
        constraint = None
        if sampling.grammar is not None:  # a schema takes tens of milliseconds
            constraint = await loop.run_in_executor(None, Constraint, sampling.grammar)
        body = {
            "prompt": list(prompt),
            "max_tokens": min(max_tokens or room, room),
            "stream": True,
            "return_progress": True,
            "timings_per_token": True,
            "cache_prompt": self._cache_prompt,
            "lora": self._scales(sampling.lora),
            **sampling.values,
            **({} if constraint is None else {"grammar": constraint.text}),
        }
        answer = _Answer(sampling, constraint, form)
        await self._slot()
        call = loop.run_in_executor(self._pool, partial(self._run, json.dumps(body), answer, loop))
        call.add_done_callback(partial(self._ended, answer))
        self._answers.add(answer)
        self._count()
        try:
            while True:
                await answer.wait()
                ready, answer.ready = answer.ready, []
                for delta in ready:
                    yield delta
                if answer.failure is not None:
                    raise answer.failure
                if answer.over and not answer.ready:
                    return
        finally:
            answer.cancelled = True

    def close(self) -> None:
        """Cancels all requests and ends the engine, when its calls have returned."""
        for answer in self._answers:
            answer.cancelled = True
        self._pool.shutdown()
        self._server = None
        self._directory.close()

    async def _call(self, route: str, body: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self._socket.call, route, body)

    def _room(self, prompt: int) -> int:
        """Most tokens of an answer."""
        if prompt == 0:
            raise InvalidArgumentError("prompt must be non-empty")
        if prompt >= self.context_length:
            raise InvalidArgumentError(
                f"This model's maximum context length is {self.context_length} tokens. However, your prompt "
                f"contains {prompt} tokens. Please shorten the prompt."
            )
        return self.context_length - prompt

    def _scales(self, wanted: str) -> list[dict[str, float]]:
        if wanted and wanted not in self._adapters:
            raise InvalidArgumentError(f"lora_name: the model has no adapter {wanted!r}")
        return [{"id": index, "scale": float(name == wanted)} for index, name in enumerate(self._adapters)]

    async def _slot(self) -> None:
        """Waits for a slot, whose thread is free."""
        self._waiting += 1
        self._count()
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    def _count(self) -> None:
        self._report(len(self._answers), self._waiting)

    def _run(self, body: str, answer: _Answer, loop: asyncio.AbstractEventLoop) -> None:
        """Runs a request in the engine, on its slot's thread."""

        def receive(text: str) -> bool:
            if answer.cancelled:
                return True
            self._inbox.append((answer, text))
            if not self._awake:
                self._awake = True
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._deliver)
            return False

        self._server.handle_completions(body, receive)

    def _deliver(self) -> None:
        """Gives the pieces that have come to their requests."""
        self._awake = False  # before the inbox is read: a piece that comes meanwhile wakes again
        fresh: dict[_Answer, None] = {}
        while self._inbox:
            answer, text = self._inbox.popleft()
            try:
                answer.take(text)
            except InternalError as error:
                answer.fail(error)
            fresh[answer] = None
        for answer in fresh:
            answer.wake()

    def _ended(self, answer: _Answer, call: asyncio.Future[None]) -> None:
        """Frees the slot of a request that the engine has left."""
        self._deliver()
        self._free.release()
        self._answers.discard(answer)
        self._count()
        error = None if call.cancelled() else call.exception()
        if isinstance(error, _UNCAUGHT):
            answer.fail(InvalidArgumentError(f"the engine refuses the request: {error}"))
        elif error is not None or not answer.over:
            if not answer.cancelled:
                log.error("the engine of model '%s' ended an answer: %s", self._name, error)
            answer.fail(UnavailableError(f"the engine of model '{self._name}' failed; please try again"))
        answer.wake()


def _adapter(file: Path) -> Any:
    found = xllamacpp.CommonAdapterLoraInfo()
    found.path = str(file)
    found.scale = 0.0
    return found


def _text(piece: str | list[int]) -> str:
    """The text of a piece; one that is none by itself comes as bytes."""
    return piece if isinstance(piece, str) else bytes(piece).decode(errors="replace")


def _error(found: dict[str, Any]) -> ConchError:
    text = f"the engine refuses the request: {found['message']}"
    if found.get("code") == 400:
        return InvalidArgumentError(text)
    return UnavailableError(text) if found.get("code") == 503 else InternalError(text)
