"""Arguments of Python models' methods, `ChatRequest` and `CompletionRequest`, and their parsing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from conch.core.errors import InvalidArgumentError
from conch_llm.contract import ADAPTER, MOST_DETOKENIZED, MOST_TOKENIZED

_MOST_CHOICES = 128
_READ = frozenset(
    (
        *(
            "messages",
            "prompt",
            "input",
            "query",
            "documents",
            "queries",
            "text_1",
            "text_2",
            "model",
            "tools",
            "tokens",
            "add_special_tokens",
            "return_token_strs",
        ),
        *("n", "max_tokens", "max_completion_tokens", "stop", "seed", "stream", "stream_options", "echo"),
        ADAPTER,
    )
)
"""Members of a body that are no sampling parameters, or have an attribute of their own."""

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Fields that all requests for text have.

    Attributes:
        params: Further members of the request, such as ``temperature`` and ``top_p``; only those that the
            client has sent.
        max_tokens: Most tokens of each choice; None for no limit.
        stop: Strings that end a choice. They are cut off the model's answer.
        seed: Seed of the choice; None for a random one.
        n: Number of choices. Each has a call of its own, with n = 1, unless the class has ``handles_n =
            True``.
        stream: True if the client gets the answer piece by piece.
        lora: Name of a LoRA adapter; empty for none.
        id: The client's request id, or empty.
        raw: The body of the OpenAI request, or the sampling parameters of a request of tensors.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    stream: bool = False
    lora: str = ""
    id: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


def _no_template(request: ChatRequest) -> str:
    raise InvalidArgumentError("the model has no chat template")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TextRequest):
    """A request to `chat`.

    Attributes:
        messages: The conversation, as in OpenAI's API.
        tools: The tools that the model may call, as in OpenAI's API.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template: Callable[[ChatRequest], str] = field(default=_no_template, repr=False)

    def prompt(self) -> str:
        """The conversation as one text, by the model's chat template.

        Raises:
            InvalidArgumentError: The model has none, or it refuses the conversation.
        """
        return self.template(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(TextRequest):
    """A request to `complete`.

    Attributes:
        prompt: The text, or its tokens.
    """

    prompt: str | Sequence[int]

    @classmethod
    def of(cls, chat: ChatRequest) -> CompletionRequest:
        """A conversation as a prompt. Raises InvalidArgumentError: see `ChatRequest.prompt`."""
        shared = {each.name: getattr(chat, each.name) for each in fields(TextRequest)}
        return cls(prompt=chat.prompt(), **shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A request to `embed` or `score`.

    Attributes:
        params: Further members of the request, such as ``dimensions`` or ``instruction``.
        id: The client's request id, or empty.
        raw: The body of the request.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A request to `tokenize` or `detokenize`.

    Attributes:
        add_special_tokens: True if special tokens are put around a text, by default around one that is no
            conversation.
        token_strs: True if the client wants each token's text, too.
        chat: The conversation, if the text is one; its `prompt()` is the text.
        id: The client's request id, or empty.
        raw: The body of the request.
    """

    add_special_tokens: bool = True
    token_strs: bool = False
    chat: ChatRequest | None = None
    id: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


Text = TypeVar("Text", bound=TextRequest)


def chat_request(body: Body, template: Callable[[ChatRequest], str], id: str = "") -> ChatRequest:
    """Reads the body of a chat completion.

    Raises:
        InvalidArgumentError: A member is invalid; the text names it.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidArgumentError("messages: must be a list of at least one object")
    tools = body.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(each, dict) for each in tools):
        raise InvalidArgumentError("tools: must be a list of objects")
    return ChatRequest(messages=messages, tools=tools, template=template, **_shared(body, id))


def completion_requests(body: Body, id: str = "") -> list[CompletionRequest]:
    """Reads the body of a completion, which may have several prompts.

    Raises:
        InvalidArgumentError: A member is invalid; the text names it.
    """
    shared = _shared(body, id)
    return [CompletionRequest(prompt=prompt, **shared) for prompt in texts(body.get("prompt"), "prompt")]


def texts(found: object, name: str) -> list[str | list[int]]:
    """One or several texts, each as a string or as tokens.

    Raises:
        InvalidArgumentError: They are something else; the text says so, with `name`.
    """
    if isinstance(found, str) or _is_tokens(found):
        found = [found]
    if isinstance(found, list) and found and all(isinstance(each, str) or _is_tokens(each) for each in found):
        return found
    raise InvalidArgumentError(f"{name}: must be a text, a list of tokens, or a list of these")


def embedding_request(body: Body, id: str = "") -> EmbeddingRequest:
    """Reads what `embed` and `score` get beside texts."""
    return EmbeddingRequest(params=_params(body), id=id, raw=body)


def tokenize_request(
    body: Body, template: Callable[[ChatRequest], str], id: str = ""
) -> tuple[str | Sequence[Mapping[str, Any]], TokenizeRequest]:
    """Reads a request for tokens: the text or the messages, and the rest.

    Raises:
        InvalidArgumentError: A member is invalid; the text names it.
    """
    chat = None
    if body.get("messages") is not None:
        chat = chat_request(body, template, id)
    elif not isinstance(body.get("prompt"), str):
        raise InvalidArgumentError("prompt: must be a text; or give messages")
    elif len(body["prompt"]) > MOST_TOKENIZED:
        raise InvalidArgumentError(f"prompt: must have at most {MOST_TOKENIZED} characters")
    request = TokenizeRequest(
        add_special_tokens=_switch(body, "add_special_tokens", chat is None),
        token_strs=_switch(body, "return_token_strs", False),
        chat=chat,
        id=id,
        raw=body,
    )
    return body["prompt"] if chat is None else chat.messages, request


def detokenize_request(body: Body, id: str = "") -> tuple[list[int], TokenizeRequest]:
    """Reads a request for the text of tokens: the tokens, and the rest.

    Raises:
        InvalidArgumentError: A member is invalid; the text names it.
    """
    tokens = body.get("tokens")
    if not (
        isinstance(tokens, list)
        and len(tokens) <= MOST_DETOKENIZED
        and all(type(each) is int and each >= 0 for each in tokens)
    ):
        raise InvalidArgumentError(f"tokens: must be a list of at most {MOST_DETOKENIZED} tokens")
    return tokens, TokenizeRequest(id=id, raw=body)


def with_tokens(returned: Any) -> tuple[Any, int | None]:
    """An array that `embed` or `score` returned, and the number of tokens if that was beside it.

    There may be one number, or one for each row.
    """
    if not isinstance(returned, tuple):
        return returned, None
    found, counts = returned
    return found, counts if isinstance(counts, int) else sum(int(count) for count in counts)


def pairs(body: Body) -> Iterator[tuple[str, list[str]]]:
    """Queries with the documents whose scores are asked for, in order.

    Raises:
        InvalidArgumentError: A member is invalid; the text names it.
    """
    queries = _listed(body, ("query", "text_1", "queries"))
    documents = _listed(body, ("documents", "text_2"))
    if len(queries) == 1:
        yield queries[0], documents
        return
    if len(queries) != len(documents):
        raise InvalidArgumentError(
            f"{len(queries)} queries need as many documents, not {len(documents)}; or a single query"
        )
    for query, document in zip(queries, documents, strict=True):
        yield query, [document]


def _listed(body: Body, names: Sequence[str]) -> list[str]:
    name = next((name for name in names if name in body), names[0])
    found = body.get(name)
    listed = [
        each.get("text") if isinstance(each, dict) else each
        for each in (found if isinstance(found, list) else [found])
    ]
    texts = [each for each in listed if isinstance(each, str)]
    if not texts or len(texts) != len(listed):
        raise InvalidArgumentError(f"{name}: must be a text or a list of texts")
    return texts


def choices_of(request: Text) -> list[Text]:
    """A request for each choice; with a seed, each choice has one of its own."""
    if request.n == 1:
        return [request]
    seed = request.seed
    return [
        replace(request, n=1, seed=None if seed is None else seed + number) for number in range(request.n)
    ]


def _params(body: Body) -> dict[str, Any]:
    """The members of a body that are sampling parameters."""
    return {key: value for key, value in body.items() if key not in _READ and value is not None}


def _is_tokens(found: object) -> bool:
    return isinstance(found, list) and bool(found) and all(type(each) is int for each in found)


def _shared(body: Body, id: str) -> dict[str, Any]:
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(each, str) for each in stop):
        raise InvalidArgumentError("stop: must be a text or a list of texts")
    n = _integer(body, "n", 1)
    if n is not None and n > _MOST_CHOICES:
        raise InvalidArgumentError(f"n: must be at most {_MOST_CHOICES}, not {n}")
    most = _integer(body, "max_completion_tokens", 1)
    return {
        "params": _params(body),
        "max_tokens": _integer(body, "max_tokens", 1) if most is None else most,
        "stop": tuple(filter(None, stop)),
        "seed": _integer(body, "seed", None),
        "n": n or 1,
        "stream": body.get("stream") is True,
        "lora": str(body.get(ADAPTER) or ""),
        "id": id,
        "raw": body,
    }


def _switch(body: Body, name: str, default: bool) -> bool:
    found = body.get(name)
    if found is None or isinstance(found, bool):
        return default if found is None else found
    raise InvalidArgumentError(f"{name}: must be true or false, not {found!r}")


def _integer(body: Body, name: str, least: int | None) -> int | None:
    found = body.get(name)
    if found is None or (type(found) is int and (least is None or found >= least)):
        return found
    above = "" if least is None else f" of at least {least}"
    raise InvalidArgumentError(f"{name}: must be an integer{above}, not {found!r}")
