"""Settings of OpenAI's routes by flags, as the routes use them; imports little."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch.access.access_guard import Restrictions


@dataclass(frozen=True, slots=True)
class TextDefaults:
    """Settings by flags of models whose config has none.

    Attributes:
        tokenizer: Folder of a tokenizer; None for none.
        chat_template: File of a chat template; None for none.
        tool_parser: Name of the syntax of tool calls; empty for none.
    """

    tokenizer: Path | None = None
    chat_template: Path | None = None
    tool_parser: str = ""


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """Settings by flags of the routes of all ports.

    Attributes:
        keys: API keys; empty for none.
        restrictions: Categories of routes that need a key of their own, besides those of the port.
        most_answers: Most prompts of a completion, times its choices.
        default_max_tokens: Limit of an answer whose request has none; None for OpenAI's.
        store_bytes: Bytes of responses that are kept; 0 keeps none.
        lora_separator: Between a model and its adapter in names; empty for names of adapters alone.
        texts: Defaults of models that get prompts.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    restrictions: Restrictions = field(default_factory=dict)
    most_answers: int = 128
    default_max_tokens: int | None = None
    store_bytes: int = 0
    lora_separator: str = ""
    texts: TextDefaults = field(default_factory=TextDefaults)
