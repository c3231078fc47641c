"""Capabilities of a model for text, read from its config."""

from __future__ import annotations

from dataclasses import dataclass

from conch.core.spec import ModelSpec, TensorSpec
from conch_llm.contract import CHAT, COMPLETIONS, DECLARATION, EMBEDDINGS, ROUTES_BY_DECLARATION

_PROMPTS = ("text_input", "prompt", "PROMPT")
_WITHOUT_TEXT = {"embed", "score", "tokenize"}
_FLOATS = ("FP16", "BF16", "FP32", "FP64")

EMBEDDING_REQUEST = "embedding_request"
"""Input of vLLM's models for requests of embeddings, as JSON."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Ways in which a model answers OpenAI's routes.

    Attributes:
        declared: Declarations of routes whose bodies the model takes unchanged, see `contract.py`.
        prompt: Its input for a prompt; empty without one.
        output: Its output of text; empty without one.
        embedding: True if it takes requests for embeddings, or its only float output can be an embedding of
            its only input.
    """

    declared: frozenset[str] = frozenset()
    prompt: str = ""
    output: str = ""
    embedding: bool = False

    @property
    def native(self) -> bool:
        """True if the model answers in finished pieces of an HTTP response."""
        return "native" in self.declared

    @property
    def speaks(self) -> bool:
        """True if the model answers any of OpenAI's routes."""
        return bool(self.declared or (self.prompt and self.output) or self.embedding)

    def takes_body(self, route: str) -> bool:
        """True if the model takes a route's body unchanged."""
        return any(route in ROUTES_BY_DECLARATION[each] for each in self.declared)

    def takes_text(self, route: str) -> bool:
        """True if the model can answer a route by its tensors."""
        if route == EMBEDDINGS:
            return self.embedding
        return route in (CHAT, COMPLETIONS) and bool(self.prompt and self.output)


def capability(spec: ModelSpec) -> Capability:
    """The capability of a model version."""
    written = str(spec.parameters.get(DECLARATION, ""))
    declared = frozenset(filter(None, (each.strip() for each in written.split(","))))
    declared &= ROUTES_BY_DECLARATION.keys()
    if declared and declared <= _WITHOUT_TEXT:
        return Capability(declared)  # its tensors take bodies only
    prompt = _prompt(spec)
    output = _output(spec)
    return Capability(declared, prompt, output, _embeds(spec))


def _prompt(spec: ModelSpec) -> str:
    wanted = spec.parameters.get("CONCH_TEXT_INPUT", "")
    texts = [tensor for tensor in spec.inputs if tensor.datatype == "BYTES"]
    names = [tensor.name for tensor in texts]
    if wanted:
        return wanted if wanted in names else ""
    for name in _PROMPTS:
        if name in names:
            return name
    required = [tensor.name for tensor in texts if not tensor.optional]
    return required[0] if len(required) == 1 else ""


def _output(spec: ModelSpec) -> str:
    wanted = spec.parameters.get("CONCH_TEXT_OUTPUT", "")
    names = [tensor.name for tensor in spec.outputs if tensor.datatype == "BYTES"]
    if wanted:
        return wanted if wanted in names else ""
    if "text_output" in names:
        return "text_output"
    return names[0] if len(names) == 1 else ""


def _embeds(spec: ModelSpec) -> bool:
    """True for one input of text or token ids and one float output with vectors, or vLLM's input."""
    if any(tensor.name == EMBEDDING_REQUEST for tensor in spec.inputs):
        return True
    required = [tensor for tensor in spec.inputs if not tensor.optional]
    if len(required) != 1 or len(spec.outputs) != 1:
        return False
    (source,), (result,) = required, spec.outputs
    return source.datatype in ("BYTES", "INT64") and result.datatype in _FLOATS and _rank(spec, result) >= 2


def _rank(spec: ModelSpec, tensor: TensorSpec) -> int:
    return len(spec.full_dims(tensor))
