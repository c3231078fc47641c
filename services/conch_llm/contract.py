"""The contract between the OpenAI routes and models: what a model declares, and how a route reaches it.

A model declares its ways in the parameter `DECLARATION` of its completed config; text models need none, see
`capability.py`. A request to a declared model has the unchanged body of the OpenAI request in the input
`text_input`, and the route in the request parameter `ROUTE`. The model is decoupled and responds with
`text_output` of one element, in the form that its declaration names:

    =================  =====================================================================================
    declared           each response
    =================  =====================================================================================
    ``native``         a piece of the body of an HTTP response, sent on as it is; the first has the parameters
                       `STATUS` and `CONTENT_TYPE`
    ``chat``,          deltas as JSON, see `deltas.py`
    ``complete``
    ``embed``          one: JSON ``{"data": [[float, ...], ...], "prompt_tokens": int | null}``
    ``score``          one: JSON ``{"scores": [float, ...], "prompt_tokens": int | null}``
    ``tokenize``       one: JSON of vLLM's response to /tokenize or /detokenize
    =================  =====================================================================================

A declaration is a comma list, such as ``chat,complete`` or ``native``. An error about the request is the
response's error. Closing the connection cancels the request.
"""

from __future__ import annotations

DECLARATION = "CONCH_LLM"
"""Config parameter: the declarations of a model, separated by commas."""

SERVED_NAMES = "served_model_name"
"""Config parameter: a comma list of further names of the model, which may hold ``/``."""

ADAPTERS = "CONCH_LLM_ADAPTERS"
"""Config parameter: a comma list of the adapters that the model can use by name."""

ADAPTER = "lora_name"
"""Request parameter, or sampling parameter: name of a LoRA adapter."""

ROUTE = "openai_route"
"""Request parameter: the route, such as ``/v1/chat/completions``."""

STATUS = "http_status"
CONTENT_TYPE = "content_type"

BODY_INPUT = "text_input"
ANSWER_OUTPUT = "text_output"

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

MOST_TOKENIZED = 1 << 19
"""Characters of a text whose tokens are asked for: about a second of an engine that others wait for."""
MOST_DETOKENIZED = 1 << 17
"""Tokens whose text is asked for."""

PREFIXES = ("/v1/", "/openai/")
"""Prefixes of paths that belong to OpenAI's routes."""

ROUTES_BY_DECLARATION = {
    "native": (
        *(CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, COUNT_TOKENS),
        *(RERANK, SCORE, TOKENIZE, DETOKENIZE),
    ),
    "chat": (CHAT,),
    "complete": (COMPLETIONS,),
    "embed": (EMBEDDINGS,),
    "score": (RERANK, SCORE),
    "tokenize": (TOKENIZE, DETOKENIZE),
}
"""Routes that a model takes with its body; a native model may still refuse some."""
