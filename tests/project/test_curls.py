"""Comparison of a page's excerpts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.curls import differs, examples


@pytest.mark.parametrize(
    ("documented", "actual"),
    [
        ("", ""),
        ('{"a": 1}', '{"b":2,"a":1}'),
        ('{"a": "…", "…": "…"}', '{"a":[{}]}'),
        ('{"error": "no …"}', '{"error":"no such thing"}'),
        ('[1, "…"]', "[3, 1, 2]"),
        ("[]", " []"),
        ('{"a": 1}\n  5   6\n', '{"a": 1}\n       5 6'),
        ("data: 1\n…\n", "data: 1\n\ndata: 2\n\n"),
        ('…\nm{a="b"} …\n…', '# HELP m\nm{a="b"} 3\nn 4\n'),
    ],
)
def test_an_excerpt_is_found(documented: str, actual: str) -> None:
    assert differs(documented, actual) is None


@pytest.mark.parametrize(
    ("documented", "actual"),
    [
        ("", "more"),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": 1} and more'),
        ('{"a": {"b": 1}}', '{"a": {}}'),
        ('{"a": "1"}', '{"a": 1}'),
        ("[1, 2]", "[1]"),
        ('[1, 2, "…"]', "[2, 1]"),
        ('{"a": 1}', "plain"),
        ("data: 1", "data: 2"),
        ("…\nm 1\n…", "n 1"),
    ],
)
def test_a_difference_is_told(documented: str, actual: str) -> None:
    assert differs(documented, actual)


def test_commands_are_found_with_their_answers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# P\n```sh\ncurl before\n```\n### A\n```sh\nls\n```\n"
        "```sh\ncurl x\n```\n```http\n200\nX-Y: z\n\n{}\n```\n"
    )
    assert list(examples(page, 3)) == ["A"]
    (example,) = examples(page, 3)["A"]
    assert (example.command, example.status, example.headers) == ("curl x\n", 200, {"x-y": "z"})
    assert example.output == "{}\n"
    page.write_text("### A\n```sh\ncurl x\n```\nwords\n```http\n200\n```\n")
    with pytest.raises(AssertionError, match="no answer"):
        examples(page, 3)
