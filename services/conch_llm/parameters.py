"""Parameters of configs that the add-on reads, whatever the backend; entry point of ``conch.parameters``."""

from __future__ import annotations

from conch_llm.contract import DECLARATION
from conch_llm.models import answer_parsers

PARAMETERS = (
    *(DECLARATION, "CONCH_LLM_ADAPTERS", "served_model_name"),
    *("CONCH_TEXT_INPUT", "CONCH_TEXT_OUTPUT", "CONCH_TEXT_MODE", "chat_template", "tokenizer"),
    *answer_parsers.PARAMETERS,
)
