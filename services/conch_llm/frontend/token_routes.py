"""Tokens of texts by the tokenizer of a model that gets prompts; the shapes are vLLM's.

Threads and locks: event loop only; tokenizers run on a thread of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch_llm.frontend.model_names import NamedModel
from conch_llm.frontend.openai_answers import encoded_around
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import (
    DETOKENIZE_FIELDS,
    TOKENIZE_CHAT_FIELDS,
    TOKENIZE_FIELDS,
    checked,
)
from conch_llm.frontend.text_models import TextModels

_ID_BYTES, _SHOWN_BYTES = 6, 24  # of a token in an answer


class TokenRoutes:
    """Answers /tokenize and /detokenize.

    Args:
        texts: Tokenizers and templates.
    """

    def __init__(self, texts: TextModels) -> None:
        self._texts = texts

    async def tokenize(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers with the tokens of a prompt or of a chat."""
        if body.get("messages") is not None:
            fields = await call.run_long(checked, body, TOKENIZE_CHAT_FIELDS, ("messages",))
            prompt, special = await self._texts.chat_prompt(model.servable, fields), False
        else:
            fields = await call.run_long(checked, body, TOKENIZE_FIELDS, ("prompt",))
            prompt, special = fields["prompt"], True
        tokenizer = await self._texts.tokenizer(model.servable)
        if tokenizer is None:
            raise no_tokenizer(model)
        special = fields.get("add_special_tokens", special)
        ids = await self._texts.run(lambda: tokenizer.encode(prompt, special))
        shows = fields.get("return_token_strs")
        longest = model.entry()["max_model_len"]

        def answer() -> bytes:
            shown = tokenizer.tokens(ids) if shows else None
            head = {"count": len(ids), "max_model_len": longest, "token_strs": shown}
            return encoded_around(head, "tokens", ids)

        await call.reply_with(answer, len(ids) * (_SHOWN_BYTES if shows else _ID_BYTES))

    async def detokenize(self, call: OpenAiCall, model: NamedModel, body: Mapping[str, Any]) -> None:
        """Answers with the text of tokens."""
        fields = await call.run_long(checked, body, DETOKENIZE_FIELDS, ("tokens",))
        tokenizer = await self._texts.tokenizer(model.servable)
        if tokenizer is None:
            raise no_tokenizer(model)
        call.reply({"prompt": await self._texts.run(lambda: tokenizer.decode(fields["tokens"]))})


def no_tokenizer(model: NamedModel) -> RequestError:
    """The error of a model whose tokens the server can't count."""
    return RequestError(
        f"The model `{model.name}` has no tokenizer: put tokenizer.json into its version directory, or name "
        f"its folder by the parameter tokenizer of its config, or by --openai-tokenizer",
        "model",
    )
