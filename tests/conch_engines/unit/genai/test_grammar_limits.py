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
    with pytest.raises(InvalidArgumentError, match="grammar: has 65537 characters"):
        check_limits(Grammar("grammar", 'root ::= "a" [0-9]{65536}'))


def texts(*lengths: int) -> Any:
    return {"properties": {f"text{at}": {"maxLength": length} for at, length in enumerate(lengths)}}


@pytest.mark.parametrize(
    ("kind", "fits", "beyond"),
    [
        ("regex", "(.{0,200}a){2}", "(.{0,200}a){3}"),
        ("regex", "(.{0,128}a){384}", "(.{0,129}a){4}"),  # copies of larger groups are compiled each
        ("regex", ".{0,4000}a.{0,256}", ".{0,4000}a.{0,256}b.?"),
        ("regex", "(.?){16}", "(.?){17}"),
        ("regex", ".?" * 16, ".?" * 17),
        ("regex", "(?:.{0,7}^){0,6}", "(?:.{0,8}^){0,8}"),
        ("regex", "(a|.{0,7}){0,6}", "(a|.{0,8}){0,8}"),
        ("regex", r"(\w{1,20}\s?){1,3}", r"(\w{1,20}\s?){1,20}"),
        ("regex", "(.{1,4})*", "(.{1,5})*"),
        ("regex", "((a|b|c|d){0,200}x){9}", "((a|b|c|d|e){0,200}x){9}"),
        ("regex", "([abcd]{0,200}x){9}", "([abcde]{0,200}x){9}"),
        ("regex", "(.|a|[^b]){128}", "(.|..|...){9}"),
        ("json_schema", texts(1000, 1000, 1000, 900), texts(1000, 900, 100)),
        ("json_schema", texts(100, 101, 102, 103, 104), texts(100, 101, 102, 103, 104, 105)),
        (
            "json_schema",
            {"maxItems": 1000, "items": {"pattern": ".{0,200}a"}, "not": {"pattern": ".{0,200}a"}},
            {"items": {"pattern": "(.{0,200}a){10}"}},
        ),
        ("grammar", "root ::= item{16}\nitem ::= [a-z ]?", "root ::= item{17}\nitem ::= [a-z ]?"),
        ("grammar", 'a ::= b{99}\nb ::= "- " [^\\n]{1,80} a?', "a ::= b b{9}\nb ::= c+ # x\nc ::= .{0,8}"),
    ],
)
def test_counted_sets_are_bounded_by_what_the_compiler_does(kind: str, fits: Any, beyond: Any) -> None:
    def check(grammar: Any) -> None:
        check_limits(Grammar(kind, grammar if isinstance(grammar, str) else json.dumps(grammar)))

    check(fits)
    with pytest.raises(
        InvalidArgumentError, match=f"{kind}: its counted .* states, and at most 512 .*count less"
    ):
        check(beyond)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?(Z|[+-]\d{2}:\d{2})",
        r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
        "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        "[0-9a-fA-F]{4000}",
        ".{0,500}",
        "([a-z]{1,20} ){0,400}",
        r"(\w+[ ,.]?){1,200}",
        "(https?://)?([a-z0-9-]{1,63}\\.){1,8}[a-z]{2,24}(/[^ ]*)?",
        "|".join(f"choice {each}" for each in range(200)),
        "((a?){60}){60}",
    ],
)
def test_ordinary_patterns_pass(pattern: str) -> None:
    check_limits(Grammar("regex", pattern))


def test_a_chain_of_rules_is_bounded() -> None:
    def chain(rules: int) -> str:
        return "\n".join(f"r{each} ::= r{each + 1}" for each in range(rules))

    check_limits(Grammar("grammar", chain(64)))
    with pytest.raises(InvalidArgumentError, match="more rules within rules"):
        check_limits(Grammar("grammar", chain(65)))


@pytest.mark.parametrize("count", ["9" * 4000, "0" * 3000 + "9" * 900])
def test_a_count_of_many_digits_is_refused(count: str) -> None:
    with pytest.raises(InvalidArgumentError, match="characters and sets"):
        check_limits(Grammar("regex", f"a{{{count}}}"))
