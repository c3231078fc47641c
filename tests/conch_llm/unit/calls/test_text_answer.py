"""Texts, ends, counts and log probabilities from the responses of text models."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conch.core.request import InferenceResponse
from conch.core.tensor import Tensor
from conch_llm.calls.text_answer import AnswerForm, TextAnswer, TextPieces


@st.composite
def splits(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text, and its bytes in pieces that may end within characters."""
    text = draw(st.text("abü€𐍈 \n", min_size=1, max_size=30))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=8))) if len(data) > 1 else []
    return text, [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def read(mode: str, responses: list[bytes]) -> str:
    pieces = TextPieces(mode)
    return "".join([*map(pieces.add, responses), pieces.end()])


def so_far(pieces: list[bytes]) -> list[bytes]:
    return [b"".join(pieces[: count + 1]) for count in range(len(pieces))]


@given(splits())
def test_both_ways_of_a_decoupled_model_give_the_text(case: tuple[str, list[bytes]]) -> None:
    text, pieces = case
    assert read("delta", pieces) == text
    assert read("cumulative", so_far(pieces)) == text
    assert read("", so_far(pieces)) == text
    # What begins with all that came before looks cumulative.
    if len(pieces) < 2 or not pieces[1].startswith(pieces[0]):
        assert read("", pieces) == text


@given(st.integers(2, 5), st.booleans())
def test_repeated_first_pieces_are_kept_until_another_decides(count: int, ends: bool) -> None:
    repeated = [b"ha"] * count
    assert read("", repeated if ends else [*repeated, b"!"]) == "ha" * count + ("" if ends else "!")


def test_a_first_piece_may_end_with_a_broken_character_that_stays() -> None:
    assert read("", ["a\ufffd".encode(), b"b"]) == "a\ufffdb"


@given(st.text("aü€", min_size=1))
def test_a_cumulative_text_may_end_with_a_broken_character(text: str) -> None:
    broken = [text[:count] + "\ufffd" for count in range(len(text))]
    assert read("cumulative", [each.encode() for each in [*broken, text]]) == text


def response(text: str, **numbers: int) -> InferenceResponse:
    outputs = [Tensor.from_array("text_output", np.array([text.encode()], object))]
    outputs += [Tensor.from_array(name, np.array([value], np.uint32)) for name, value in numbers.items()]
    return InferenceResponse(outputs)


def test_counts_of_the_model_make_the_usage_and_the_reason() -> None:
    answer = TextAnswer(3, AnswerForm("text_output", "delta", max_tokens=3, counts_prompt=True, echo="say "))
    found = [
        *answer.read(response("a", num_input_tokens=7, num_output_tokens=1), False),
        *answer.read(response("b", num_input_tokens=7, num_output_tokens=2), False),
        *answer.read(None, True),
    ]
    assert "".join(delta.text for delta in found) == "say ab"
    assert [delta.prompt_tokens for delta in found] == [7, None, None]
    assert sum(delta.tokens for delta in found) == 3
    assert [delta.finish_reason for delta in found] == [None, None, "length"]
    assert {delta.index for delta in found} == {3}


class Words:
    """Counts words."""

    longest: int | None = None
    beyond = 1 << 31

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def count(self, text: str, add_special_tokens: bool = True) -> int:
        return len(text.split()) + add_special_tokens


def test_a_tokenizer_counts_for_models_that_do_not() -> None:
    form = AnswerForm("text_output", "delta", 9, Words(), "one two", counts_prompt=True)
    (delta,) = TextAnswer(0, form).read(response("three four five"), True)
    assert (delta.prompt_tokens, delta.tokens, delta.finish_reason) == (3, 3, "stop")


def bytes_of(entries: dict[str, Any]) -> Any:
    given = response("")
    given.outputs.append(Tensor.from_array("logprobs", np.array([json.dumps([entries]).encode()], object)))
    (found,) = TextAnswer(0, AnswerForm("text_output", "delta", logprobs=1, chat=True)).read(given, True)
    return found.logprobs[0]["bytes"]


def test_a_prompt_of_tokens_is_counted() -> None:
    form = AnswerForm("text_output", "delta", 9, Words(), [5, 6, 7], counts_prompt=True)
    (delta,) = TextAnswer(0, form).read(response("three four"), True)
    assert (delta.prompt_tokens, delta.tokens) == (3, 2)


def test_log_probabilities_have_the_shapes_of_both_routes() -> None:
    tokens = [
        {
            "5": {"logprob": -3.0, "rank": 3, "decoded_token": "ü"},
            "6": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        },
        {"6": {"logprob": -0.2, "rank": 1, "decoded_token": "a"}},
    ]
    broken = {"7": {"logprob": -1.0, "rank": 1, "decoded_token": "\ufffd"}}
    assert bytes_of(broken) is None  # the engine does not tell them
    given = response("üa")
    given.outputs.append(Tensor.from_array("logprobs", np.array([json.dumps(tokens).encode()], object)))
    (chat,) = TextAnswer(0, AnswerForm("text_output", "delta", logprobs=1, chat=True)).read(given, True)
    top = {"token": "a", "logprob": -0.1, "bytes": [97]}
    assert chat.logprobs[0] == {"token": "ü", "logprob": -3.0, "bytes": [195, 188], "top_logprobs": [top]}
    (completion,) = TextAnswer(0, AnswerForm("text_output", "delta", logprobs=1)).read(given, True)
    assert completion.logprobs == {
        "tokens": ["ü", "a"],
        "token_logprobs": [-3.0, -0.2],
        "top_logprobs": [{"a": -0.1}, {"a": -0.2}],
        "text_offset": [0, 1],
    }
