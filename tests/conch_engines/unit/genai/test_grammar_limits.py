"""Grammars over a limit are refused; harmless ones just above, so that a limit that is lost does no harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.core.errors import InvalidArgumentError
from conch_engines.language.grammar_limits import check_limits
from conch_engines.language.grammars import Grammar


def nested(depth: int) -> Any:
    return {} if depth == 1 else {"not": nested(depth - 1)}


def items(*counts: int) -> Any:
    return {"maxItems": counts[0], "items": items(*counts[1:])} if counts else {}


@pytest.mark.parametrize(
    ("fits", "beyond", "text"),
    [
        ("a" * 4096, "a" * 4097, "4097 characters, and at most 4096"),
        ("a{65536}", "a{65537}", "65537 characters and sets with its repetitions written out"),
        ("(ab{255}){256}", "(ab{256}){256}", "65792 characters and sets"),
        ("(a{1,256}){256}", "((a|b){1,256}){129,257}", "characters and sets"),
        (r"[a\]b]{65536}", r"[a\]b]{65537}", "65537 characters and sets"),
        (r"\({65536}", r"\({65537}", "65537 characters and sets"),
        ("(" * 16 + "a" + ")" * 16, "(" * 17 + "a" + ")" * 17, "groups within groups, and at most 16"),
        ("((a+)+b)*", "(((a+)+b)*c)*", "repetitions within repetitions, and at most 3"),
    ],
)
def test_a_pattern_is_bounded(fits: str, beyond: str, text: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": beyond}}}
    check_limits(Grammar("regex", fits))
    check_limits(Grammar("json_schema", json.dumps({"type": "string", "pattern": fits})))
    with pytest.raises(InvalidArgumentError, match=f"regex: has .*{text}"):
        check_limits(Grammar("regex", beyond))
    if len(beyond) <= 4096:  # the limit of a schema's text is another
        with pytest.raises(InvalidArgumentError, match=f"json_schema: has .*{text}"):
            check_limits(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("fits", "beyond", "text"),
    [
        ({"title": "a" * 16000}, {"title": "a" * 16384}, "characters, and at most 16384"),
        (
            {"enum": ["a" * 4000]},
            {"enum": ["a" * 2000], "not": {"const": "b" * 2100}},
            "4106 characters in enum",
        ),
        ({"required": [1] * 4094}, {"required": [1] * 4095}, "more values, and at most 4096"),
        (nested(32), nested(33), "more levels, and at most 32"),
        (items(1024, 1024), items(1024, 1025), "product is 1049600, and at most 1048576"),
        (
            {"patternProperties": {"a{30000}": {}, "b{30000}": {}}},
            {"patternProperties": {"a{40000}": {}, "b{40000}": {}}},
            "80000 characters and sets",
        ),
    ],
)
def test_a_schema_is_bounded(fits: Any, beyond: Any, text: str) -> None:
    check_limits(Grammar("json_schema", json.dumps(fits)))
    with pytest.raises(InvalidArgumentError, match=f"json_schema: has .*{text}"):
        check_limits(Grammar("json_schema", json.dumps(beyond)))


@pytest.mark.parametrize("length", ["1e999", "NaN", '"many"', "null"])
def test_a_length_that_is_none_is_left_to_the_engine(length: str) -> None:
    check_limits(Grammar("json_schema", f'{{"maxItems": {length}}}'))


def test_a_text_in_quotes_repeats_nothing() -> None:
    check_limits(Grammar("grammar", 'root ::= "a{99999}" | "((((((((((((((((((b"'))
    with pytest.raises(InvalidArgumentError, match="grammar: has 65539 characters"):
        check_limits(Grammar("grammar", 'root ::= "a" [b]{65528}'))
