"""The engine of a model for embeddings or scores. Threads: any; a call of the engine blocks its thread."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.temporary_folder import TemporaryFolder
from conch_engines.llama_cpp.engine_log import reported
from conch_engines.llama_cpp.engine_socket import EngineSocket
from conch_engines.llama_cpp.llama_engine import server_parameters
from conch_engines.llama_cpp.llama_file import find_model
from conch_engines.llama_cpp.llama_library import xllamacpp
from conch_engines.llama_cpp.llama_settings import LlamaSettings
from conch_engines.llama_cpp.llama_tasks import pooling_of
from conch_engines.model_config import parameter_texts

_POOLINGS = xllamacpp.llama_pooling_type
_TYPES = {
    "mean": _POOLINGS.LLAMA_POOLING_TYPE_MEAN,
    "cls": _POOLINGS.LLAMA_POOLING_TYPE_CLS,
    "last_token": _POOLINGS.LLAMA_POOLING_TYPE_LAST,
}
_BETWEEN = 4
"""Tokens that the engine puts around a query and a document, at most."""


class VectorEngine:
    """One model.

    Args:
        args: Arguments of the Python model.
        scores: True for a model that scores pairs.

    Raises:
        InvalidArgumentError: The engine can't load the file.
    """

    def __init__(self, args: Mapping[str, str], scores: bool) -> None:
        config = json.loads(args["model_config"])
        parameters = parameter_texts(config)
        directory = Path(args["model_repository"], args["model_version"])
        settings = LlamaSettings.of(parameters)
        self._file = find_model(directory, args["model_name"], config.get("default_model_filename", ""))
        self._longest = settings.context_length(self._file.context_length)
        with ExitStack() as stack:
            socket = stack.enter_context(TemporaryFolder("conch-llama-")) / "engine.sock"
            made = server_parameters(self._file.path, settings, self._longest, socket)
            made.embedding = True
            # Without it a text beside others may take several steps, of which only the last one counts.
            made.kv_unified = True
            made.n_batch = made.n_ubatch = self._longest  # a text is taken in one step
            made.pooling_type = (
                _POOLINGS.LLAMA_POOLING_TYPE_RANK if scores else _TYPES[pooling_of(self._file, parameters)]
            )
            with reported(f"'{self._file.path}'"):
                self._server: Any = xllamacpp.Server(made)
            self._directory = stack.pop_all()
        self._socket = EngineSocket(socket)
        facts = self._socket.facts()
        self._vocabulary: int = facts["meta"]["n_vocab"]

    def embed(self, inputs: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], list[int]]:
        """The vectors of texts or tokens, of length 1, and numbers of tokens."""
        tokens = [self._tokens(position, each) for position, each in enumerate(inputs)]
        found = self._answer(self._server.handle_embeddings, {"input": tokens})
        rows = sorted(found["data"], key=lambda row: row["index"])
        return [row["embedding"] for row in rows], [len(each) for each in tokens]

    def score(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        """Scores of documents by their relevance to a query, and the number of tokens."""
        self._file.check_size("query", query, self._longest)
        asked = len(self._encoded(query))
        for position, document in enumerate(documents):
            self._file.check_size(f"documents[{position}]", document, self._longest)
            self._check_length(f"documents[{position}]", asked + len(self._encoded(document)) + _BETWEEN)
        found = self._answer(self._server.handle_rerank, {"query": query, "documents": list(documents)})
        scores = {each["index"]: each["relevance_score"] for each in found["results"]}
        return [scores[index] for index in range(len(documents))], found["usage"]["prompt_tokens"]

    def close(self) -> None:
        """Ends the engine."""
        self._server = None
        self._directory.close()

    def _tokens(self, position: int, given: str | Sequence[int]) -> list[int]:
        name = f"input[{position}]"
        if isinstance(given, str):
            self._file.check_size(name, given, self._longest)
        found = self._encoded(given, add_special=True) if isinstance(given, str) else list(given)
        if not found:
            raise InvalidArgumentError(f"{name}: must be non-empty")
        for each in found:
            if not 0 <= each < self._vocabulary:
                raise InvalidArgumentError(f"{name}: {each} is no token of the model's tokenizer")
        self._check_length(name, len(found))
        return found

    def _encoded(self, text: str, add_special: bool = False) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": False}
        found: list[int] = self._socket.call("/tokenize", body)["tokens"]
        return found

    def _check_length(self, name: str, found: int) -> None:
        if found > self._longest:
            raise InvalidArgumentError(
                f"This model's maximum context length is {self._longest} tokens. However, your {name} "
                f"contains {found} tokens. Please shorten the input."
            )

    def _answer(self, call: Any, body: Mapping[str, Any]) -> Any:
        try:
            found = json.loads(call(json.dumps(body)))
        except (RuntimeError, ValueError) as error:
            raise InvalidArgumentError(f"the engine refuses the request: {error}") from None
        if "error" in found:
            text = f"the engine refuses the request: {found['error']['message']}"
            raise (InvalidArgumentError if found["error"].get("code") == 400 else UnavailableError)(text)
        return found
