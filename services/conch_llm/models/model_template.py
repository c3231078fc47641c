"""The chat template of a Python model, read when a prompt is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_llm.language.chat_template import ChatTemplate, load_chat_template
from conch_llm.models.model_requests import ChatRequest


class ModelTemplate:
    """Renders conversations; thread-safe.

    Args:
        name: The model's name.
        version_directory: The version's directory.
        parameters: The model's parameters; ``chat_template`` names a file, ``tokenizer`` a folder.
        engines_own: Reads what an engine has of ``tokenizer_config.json``, for what no file has.
    """

    def __init__(
        self,
        name: str,
        version_directory: Path,
        parameters: Mapping[str, str],
        engines_own: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._name = name
        self._version_directory = version_directory
        self._parameters = parameters
        self._engines_own = engines_own

    def render(self, request: ChatRequest) -> str:
        """The prompt of a conversation.

        Raises:
            InvalidArgumentError: There is no template, or it refuses the conversation.
            UnavailableError: A package is missing.
        """
        if self._found is None:
            raise InvalidArgumentError(
                f"model '{self._name}' has no chat template: put 'chat_template.jinja' into its version's "
                f"directory, or name a file with parameter 'chat_template'"
            )
        params = request.params
        more = dict(params.get("chat_template_kwargs") or {})
        if "reasoning_effort" in params:
            more.setdefault("reasoning_effort", params["reasoning_effort"])
        return self._found.render(
            request.messages,
            tools=None if params.get("tool_choice") == "none" else request.tools,
            documents=request.raw.get("documents"),
            add_generation_prompt=params.get("add_generation_prompt") is not False,
            chat_template_kwargs=more,
        )

    @property
    def tool_parser(self) -> str:
        """Name of the parser of the calls that the template writes; empty if it is not known.

        Raises:
            ConchError: The template is malformed, or a package is missing.
        """
        return self._found.tool_parser if self._found else ""

    @cached_property
    def _found(self) -> ChatTemplate | None:
        named = {name: self._parameters.get(name, "") for name in ("chat_template", "tokenizer")}
        return load_chat_template(self._version_directory, **named, config=self._engines_own())
