"""The answer of a text model: deltas from the tensors of its responses. Pure.

A decoupled model responds with what is new, or with all text so far. The second response that is not empty
decides: if it begins with the first and goes on, the model is cumulative. One that equals the first fits
both, so its text is kept back until another one decides. The config parameter `MODE` fixes it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.request import InferenceResponse
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor, decode_bytes
from conch_llm.calls.generation import TokenCounter
from conch_llm.calls.text_request import LOGPROBS
from conch_llm.deltas import Delta

MODE = "CONCH_TEXT_MODE"
"""Config parameter: ``delta`` or ``cumulative``."""

_DELTA = "delta"
_CUMULATIVE = "cumulative"
_CUT = "\ufffd"  # where a tokenizer has only a part of a character
_BROKEN = _CUT.encode()
_REASONS = ("stop", "length", "tool_calls", "content_filter")
_NO_REASONS = ("", "None", "null")


def text_mode(spec: ModelSpec) -> str:
    """Mode of a model's responses, delta or cumulative; empty if the responses decide.

    Raises:
        InvalidArgumentError: The parameter is wrong.
    """
    if not spec.decoupled:
        return _DELTA
    written = spec.parameters.get(MODE, "")
    if written not in ("", _DELTA, _CUMULATIVE):
        raise InvalidArgumentError(
            f"parameter {MODE} of model '{spec.name}' must be '{_DELTA}' or '{_CUMULATIVE}', not '{written}'"
        )
    return written


class TextPieces:
    """Extracts the new text of each response.

    Args:
        mode: See `text_mode`.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._first: bytes | None = b"" if mode else None
        self._repeats = 0
        self._known = b""  # of a cumulative model
        self._broken = b""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, data: bytes) -> str:
        """The new text of a response."""
        return self._decode(self._added(data))

    def end(self) -> str:
        """Text that was held back until the end."""
        kept = self._broken
        if not self._mode and self._first:
            kept += self._first * self._repeats
        return self._decode(kept, True)

    def _added(self, data: bytes) -> bytes:
        if self._mode == _DELTA or not data:
            return data
        if self._mode == _CUMULATIVE:
            return self._grown(data)
        if self._first is None:
            self._first = data
            whole = _unbroken(data)
            self._known, self._broken = whole, data[len(whole) :]
            return whole
        if data == self._first:
            self._repeats += 1
            return b""
        if data.startswith(self._known) and len(data) > len(self._first):
            self._mode = _CUMULATIVE
            return self._grown(data)
        self._mode = _DELTA
        kept = self._broken + self._first * self._repeats
        self._broken = b""
        return kept + data

    def _grown(self, data: bytes) -> bytes:
        whole = _unbroken(data)
        self._broken = data[len(whole) :]
        added = whole[len(self._known) :]
        if len(whole) > len(self._known):
            self._known = whole
        return added


def _unbroken(data: bytes) -> bytes:
    while data.endswith(_BROKEN):
        data = data[: -len(_BROKEN)]
    return data


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Form of the answer to one prompt.

    Attributes:
        output: The output of text.
        mode: See `text_mode`.
        max_tokens: Most tokens; None if unknown.
        counter: Counts tokens where the model does not; None for none.
        prompt: The prompt, or its token ids, to be counted; None if there is nothing to count.
        echo: Text in front of the answer's.
        logprobs: Alternatives of each token; None for no log probabilities.
        chat: True if log probabilities have the form of chats.
    """

    output: str
    mode: str
    max_tokens: int | None = None
    counter: TokenCounter | None = None
    prompt: str | Sequence[int] | None = None
    counts_prompt: bool = False
    echo: str = ""
    logprobs: int | None = None
    chat: bool = False


class TextAnswer:
    """Reads the responses to one request; one thread at a time.

    Args:
        index: Index of the choice.
        form: Form of the answer.
    """

    def __init__(self, index: int, form: AnswerForm) -> None:
        self._index = index
        self._form = form
        self._pieces = TextPieces(form.mode)
        self._texts: list[str] = []
        self._echo = form.echo
        self._tokens = 0
        self._counted = False
        self._prompt_told = not form.counts_prompt
        self._reason: str | None = None
        self._offset = len(form.echo)

    def read(self, response: InferenceResponse | None, final: bool) -> list[Delta]:
        """The deltas of a response; the last one has the reason of the end.

        Raises:
            ConchError: The response is malformed.
        """
        found = Delta(index=self._index)
        if response is not None:
            found = self._response({tensor.name: tensor for tensor in response.outputs})
        if final:
            found = self._last(found)
        return [] if found == Delta(index=self._index) else [found]

    def _response(self, outputs: dict[str, Tensor]) -> Delta:
        form = self._form
        text = self._pieces.add(_first_bytes(outputs.get(form.output)))
        if form.counter is not None:
            self._texts.append(text)
        text, self._echo = self._echo + text, ""
        tokens = _first_number(outputs.get("num_output_tokens"))
        if tokens is not None:
            self._counted = True
            self._tokens += tokens
        prompt_tokens = None
        if not self._prompt_told:
            prompt_tokens = _first_number(outputs.get("num_input_tokens"))
            self._prompt_told = prompt_tokens is not None
        reason = _first_bytes(outputs.get("finish_reason")).decode(errors="replace")
        if reason not in _NO_REASONS:
            self._reason = _finish_reason(reason)
        logprobs = None
        if form.logprobs is not None:
            logprobs = self._logprobs(_first_bytes(outputs.get(LOGPROBS)))
        return Delta(text, self._index, tokens=tokens or 0, prompt_tokens=prompt_tokens, logprobs=logprobs)

    def _last(self, found: Delta) -> Delta:
        form = self._form
        rest = self._pieces.end()
        tokens, prompt_tokens = found.tokens, found.prompt_tokens
        if form.counter is not None:
            if not self._counted:
                tokens = self._tokens = form.counter.count("".join([*self._texts, rest]), False)
            if not self._prompt_told and form.prompt is not None:
                given = form.prompt
                prompt_tokens = form.counter.count(given) if isinstance(given, str) else len(given)
        reason = self._reason
        if reason is None:
            full = form.max_tokens is not None and 0 < form.max_tokens <= self._tokens
            reason = "length" if full else "stop"
        return replace(
            found,
            text=found.text + self._echo + rest,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            finish_reason=reason,
        )

    def _logprobs(self, data: bytes) -> Any:
        if not data or data == b"null":
            return None
        try:
            tokens = [list(each.values()) for each in json.loads(data)]
            if self._form.chat:
                return [self._chat_token(each) for each in tokens]
            return self._completion_tokens(tokens)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise InternalError(f"the model's output '{LOGPROBS}' is malformed") from None

    def _chat_token(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        top = [_chat_entry(each) for each in self._top(entries)]
        return {**_chat_entry(entries[0]), "top_logprobs": top}

    def _completion_tokens(self, tokens: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        offsets = []
        for entries in tokens:
            offsets.append(self._offset)
            self._offset += len(entries[0]["decoded_token"])
        return {
            "tokens": [entries[0]["decoded_token"] for entries in tokens],
            "token_logprobs": [entries[0]["logprob"] for entries in tokens],
            "top_logprobs": [
                {each["decoded_token"]: each["logprob"] for each in self._top(entries) or entries[:1]}
                for entries in tokens
            ],
            "text_offset": offsets,
        }

    def _top(self, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The most probable ones; the chosen token comes first among all, and need not be one of them."""
        return sorted(entries, key=lambda each: int(each["rank"]))[: self._form.logprobs]


def _chat_entry(entry: dict[str, Any]) -> dict[str, Any]:
    token = entry["decoded_token"]
    known = None if _CUT in token else list(token.encode())  # of a part of a character, the bytes are lost
    return {"token": token, "logprob": entry["logprob"], "bytes": known}


def _finish_reason(written: str) -> str:
    if written in _REASONS:
        return written
    return "length" if written in ("max_tokens", "max_new_tokens", "max_length") else "stop"


def _first_bytes(tensor: Tensor | None) -> bytes:
    """The first element of an output of text; empty without one."""
    if tensor is None:
        return b""
    found = decode_bytes(tensor.data)
    return bytes(found[0]) if len(found) else b""


def _first_number(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    found = tensor.numpy().ravel()
    return int(found[0]) if found.size else None
