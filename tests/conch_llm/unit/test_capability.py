"""Declarations of models, beside the tensors that take what they declare."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.core import make_spec

from conch.core.spec import TensorSpec
from conch_llm.capability import capability
from conch_llm.contract import CHAT, COMPLETIONS, DECLARATION, EMBEDDINGS


@pytest.mark.parametrize(
    ("declared", "body", "text"),
    [
        ("", set(), {CHAT, COMPLETIONS}),
        ("native", {CHAT, COMPLETIONS, EMBEDDINGS}, {CHAT, COMPLETIONS}),
        ("chat", {CHAT}, {CHAT, COMPLETIONS}),
        ("embed", {EMBEDDINGS}, set()),
        ("score,tokenize", set(), set()),
    ],
)
def test_tensors_of_text_are_only_for_models_that_write_text(
    declared: str, body: set[str], text: set[str]
) -> None:
    spec = replace(
        make_spec(),
        inputs=(TensorSpec("text_input", "BYTES", (1,)),),
        outputs=(TensorSpec("text_output", "BYTES", (-1,)),),
        parameters={DECLARATION: declared},
    )
    found = capability(spec)
    routes = (CHAT, COMPLETIONS, EMBEDDINGS)
    assert {route for route in routes if found.takes_body(route)} == body
    assert {route for route in routes if found.takes_text(route)} == text
