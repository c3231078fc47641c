"""The engine's loop: all requests of a model in one batch that changes with each step.

`step` holds the GIL, so a thread of its own would not let others run: the loop runs on the event loop of the
instance, between whose turns the tasks of requests and the worker's threads have theirs. A turn is: requests
that came are with the engine, `step`, one decoding for all answers, and the new tokens are given to the
requests, whose tasks send them before the next step.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from conch.core.engine_text import engine_text
from conch.core.errors import ConchError, InvalidArgumentError, UnavailableError
from conch_engines.genai.blanks import Blanks
from conch_engines.genai.engine_settings import EngineSettings
from conch_engines.genai.genai_library import genai, opened, openvino
from conch_engines.genai.grammar_check import GrammarCheck, structure
from conch_engines.genai.model_on_disk import ModelFiles
from conch_engines.genai.sampling import Sampling
from conch_engines.genai.text_decoder import TextDecoder, TextStream
from conch_llm.deltas import Delta

log = logging.getLogger(__name__)

_REASONS = {genai.GenerationFinishReason.STOP: "stop", genai.GenerationFinishReason.LENGTH: "length"}
_CUT = "\ufffd"
_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")  # a byte as a token in SentencePiece's vocabularies
_IGNORED = genai.GenerationStatus.IGNORED
_SHORT = 4096  # characters, which take about 2 ms


class _Answer:
    """One running request; deltas wait in `ready` until its task takes them."""

    def __init__(self, handle: Any, sampling: Sampling, as_chat: bool) -> None:
        self.handle = handle
        self.sampling = sampling
        self.as_chat = as_chat
        self.stream = TextStream(sampling.skip_special_tokens)
        self.ready: list[Delta] = []
        self.failure: ConchError | None = None
        self.finish_reason: str | None = None
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.characters = 0  # of tokens with log probabilities
        self._blanks = Blanks() if sampling.grammar and sampling.grammar.kind == "json_schema" else None
        self._wakes: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Waits until there is something."""
        if not self.ready and self.failure is None:
            self._wakes = asyncio.get_running_loop().create_future()
            await self._wakes

    def wake(self) -> None:
        """Ends the wait."""
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    def fail(self, error: ConchError) -> None:
        """Ends the answer with an error."""
        self.failure = error
        self.wake()

    def read(self) -> bool:
        """Takes new tokens from the engine; whether there is something new."""
        self.ids, self.logprobs = [], []
        while self.handle.can_read():
            for output in self.handle.read().values():
                self.ids += output.generated_ids
                self.logprobs += output.generated_log_probs
                self.finish_reason = _REASONS.get(output.finish_reason, self.finish_reason)
        if self.ids or self.finish_reason:
            self.stream.add(self.ids, self.finish_reason is not None)
            return True
        return False

    def bound(self) -> None:
        """Ends an answer that goes on with blanks."""
        if self._blanks is not None and self._blanks.endless(self.stream.text) and not self.finish_reason:
            self.finish_reason = "length"
            self.handle.cancel()


class Engine:
    """One model.

    Args:
        name: The model's name.
        files: The model's files.
        settings: The engine's settings.
        report: Gets running requests and the used share of the KV cache after each step.

    Attributes:
        tokenizer: The engine's tokenizer.
        steps: Number of steps so far.
    """

    def __init__(
        self,
        name: str,
        files: ModelFiles,
        settings: EngineSettings,
        report: Callable[[int, float], None] = lambda running, usage: None,
    ) -> None:
        self._name = name
        self._files = files
        self._settings = settings
        self._report = report
        self._grammars = GrammarCheck()
        self._answers: list[_Answer] = []
        self._ids = count()
        self._task: asyncio.Task[None] | None = None
        self.steps = 0
        self._uncut = 64  # tokens of a text that the tokenizer is known not to cut
        self._open()

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together."""
        return self._settings.max_model_len or self._files.context_length

    def tokenizer_config(self) -> dict[str, str]:
        """The chat template and its tokens in the model's own files; texts may be empty."""
        tokenizer = self.tokenizer
        return {
            "chat_template": tokenizer.get_original_chat_template(),
            "bos_token": tokenizer.get_bos_token(),
            "eos_token": tokenizer.get_eos_token(),
        }

    async def tokens_of(self, text: str, add_special_tokens: bool) -> list[int]:
        """As `encode`; a long text takes a thread, as the tokenizer releases the GIL."""
        if len(text) <= _SHORT:
            return self.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a text. Raises InvalidArgumentError: the engine's tokenizer cuts it."""
        if not text:
            return []
        ids = self._encoded(text, add_special_tokens)
        if len(ids) > self._uncut:
            self._check_uncut(text, len(ids))
        return ids

    def check_tokens(self, name: str, ids: Sequence[int]) -> None:
        """Raises InvalidArgumentError: an id is no token; the text names the field."""
        for position, each in enumerate(ids):
            if each not in self._vocabulary:
                raise InvalidArgumentError(f"{name}[{position}]: {each} is no token of the model's tokenizer")

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself; parts of characters are U+FFFD."""
        return [self._vocabulary[each].decode(errors="replace") for each in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included. Raises InvalidArgumentError: one is none."""
        self.check_tokens("tokens", ids)
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""
        return text

    async def generate(
        self, prompt: Sequence[int], max_tokens: int | None, sampling: Sampling, as_chat: bool
    ) -> AsyncGenerator[Delta, None]:
        """Answers a prompt; closing the generator ends the request.

        Raises:
            ConchError: The prompt or the grammar is refused, or the engine fails.
        """
        room = self._room(len(prompt))
        if sampling.grammar is not None:
            self._grammars.check(sampling.grammar)
        config = self._config(sampling, max_tokens if room is None else min(max_tokens or room, room))
        answer = _Answer(self._add(prompt, config), sampling, as_chat)
        self._answers.append(answer)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        try:
            yield Delta(prompt_tokens=len(prompt))
            while True:
                await answer.wait()
                ready, answer.ready = answer.ready, []
                for delta in ready:
                    yield delta
                    if delta.finish_reason is not None:
                        return
                if answer.failure is not None and not answer.ready:
                    raise answer.failure
        finally:
            if answer in self._answers:
                self._answers.remove(answer)
                answer.handle.cancel()

    @cached_property
    def _vocabulary(self) -> dict[int, bytes]:
        return {token: text for text, token in self.tokenizer.get_vocab().items()}

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.input_ids.data[0].tolist()
        return ids

    def _check_uncut(self, text: str, found: int) -> None:
        """Raises InvalidArgumentError: the tokenizer cuts a text, as it finds no more tokens in two of it."""
        longer = len(self._encoded(f"{text} {text}", False))
        if longer > found:
            self._uncut = longer - 1
            return
        most = min(self.context_length or longer, longer - 1)
        raise InvalidArgumentError(
            f"This model's maximum context length is {most} tokens. However, your prompt contains at least "
            f"{longer} tokens, and the engine's tokenizer would cut it. Please shorten the prompt."
        )

    def _open(self) -> None:
        scheduler = genai.SchedulerConfig()
        settings = self._settings
        scheduler.cache_size = settings.cache_size_gb
        scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.dynamic_split_fuse = settings.dynamic_split_fuse
        scheduler.enable_prefix_caching = settings.enable_prefix_caching
        properties: dict[str, Any] = {}
        if settings.num_threads:
            properties["INFERENCE_NUM_THREADS"] = settings.num_threads
        path = self._files.path
        with opened(path):
            self._pipeline = genai.ContinuousBatchingPipeline(
                str(path), scheduler, settings.device, properties
            )
        self.tokenizer = self._pipeline.get_tokenizer()
        self._decoder = TextDecoder(self.tokenizer)

    def _room(self, prompt: int) -> int | None:
        """Most tokens of an answer."""
        length = self.context_length
        if prompt == 0:
            raise InvalidArgumentError("prompt must be non-empty")
        if length is None:
            return None
        if prompt >= length:
            raise InvalidArgumentError(
                f"This model's maximum context length is {length} tokens. However, your prompt contains "
                f"{prompt} tokens. Please shorten the prompt."
            )
        return length - prompt

    def _config(self, sampling: Sampling, max_tokens: int | None) -> Any:
        config = self._pipeline.get_config()
        config.apply_chat_template = False
        if max_tokens is not None:
            config.max_new_tokens = max_tokens
        for name, value in sampling.values.items():
            setattr(config, name, config.stop_token_ids | value if name == "stop_token_ids" else value)
        if sampling.grammar is not None:
            config.structured_output_config = structure(sampling.grammar)
        try:
            config.validate()
        except RuntimeError as error:
            raise InvalidArgumentError(f"the engine refuses the request: {engine_text(error)}") from None
        return config

    def _add(self, prompt: Sequence[int], config: Any) -> Any:
        tensor = openvino.Tensor(np.array([prompt], np.int64))
        try:
            return self._pipeline.add_request(next(self._ids), tensor, config)
        except RuntimeError as error:
            raise InvalidArgumentError(f"the engine refuses the request: {engine_text(error)}") from None

    async def _run(self) -> None:
        """Runs steps until there is no request."""
        # Cancelled requests leave the engine with a step.
        while self._answers or self._pipeline.has_non_finished_requests():
            try:
                self._pipeline.step()
            except RuntimeError:  # boundary: the engine can't go on after any
                log.exception("the engine of model '%s' failed and is opened again", self._name)
                self._fail_all()
                self._open()
                continue
            self.steps += 1
            self._deliver()
            metrics = self._pipeline.get_metrics()
            self._report(len(self._answers), metrics.cache_usage)
            await asyncio.sleep(0)
        self._report(0, self._pipeline.get_metrics().cache_usage)

    def _fail_all(self) -> None:
        for answer in self._answers:
            answer.fail(UnavailableError(f"the engine of model '{self._name}' failed; please try again"))
        self._answers.clear()

    def _deliver(self) -> None:
        """Gives new tokens to their requests."""
        fresh: list[_Answer] = []
        for answer in self._answers:
            if answer.read():
                fresh.append(answer)
            elif answer.handle.get_status() == _IGNORED:
                answer.fail(
                    InvalidArgumentError("the request needs more KV cache than there is: see cache_size_gb")
                )
        singles = [token for answer in fresh if answer.sampling.logprobs for token in answer.ids]
        names = iter(self._decoder.decode([answer.stream for answer in fresh], singles))
        for answer in fresh:
            answer.bound()
            answer.ready.append(self._delta(answer, names))
            answer.wake()
        self._answers = [
            answer for answer in self._answers if answer.finish_reason is None and answer.failure is None
        ]

    def _delta(self, answer: _Answer, names: Iterator[str]) -> Delta:
        stops = answer.sampling.values.get("stop_token_ids", ())
        last = answer.ids[-1] if answer.ids else None
        return Delta(
            answer.stream.text,
            finish_reason=answer.finish_reason,
            tokens=len(answer.ids),
            stop_reason=last if answer.finish_reason == "stop" and last in stops else None,
            logprobs=self._logprobs(answer, names) if answer.sampling.logprobs else None,
        )

    def _logprobs(self, answer: _Answer, names: Iterator[str]) -> Any:
        """Log probabilities of new tokens, as OpenAI's routes have them."""
        tokens = [next(names) for _ in answer.ids]
        coded = [self._bytes_of(token, name) for token, name in zip(answer.ids, tokens, strict=True)]
        numbers = [float(each) for each in answer.logprobs[: len(tokens)]]
        if answer.as_chat:
            entries = [
                {"token": token, "logprob": number, "bytes": list(data)}
                for token, number, data in zip(tokens, numbers, coded, strict=True)
            ]
            top = answer.sampling.top_logprobs
            return [{**entry, "top_logprobs": [entry] if top else []} for entry in entries]
        names_of_bytes = [
            token if token.encode() == data else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            for token, data in zip(tokens, coded, strict=True)
        ]
        offsets = []
        for data in coded:
            offsets.append(answer.characters)
            answer.characters += sum(byte & 0xC0 != 0x80 for byte in data)  # their first bytes
        return {
            "tokens": names_of_bytes,
            "token_logprobs": numbers,
            "top_logprobs": [{token: number} for token, number in zip(names_of_bytes, numbers, strict=True)],
            "text_offset": offsets,
        }

    def _bytes_of(self, token: int, name: str) -> bytes:
        """The bytes of a token, which may be part of a character: then its text does not have them."""
        if name and _CUT not in name:
            return name.encode()
        known = self._vocabulary.get(token, b"")
        byte = _BYTE.fullmatch(known)
        return known if byte is None else bytes.fromhex(byte[1].decode())
