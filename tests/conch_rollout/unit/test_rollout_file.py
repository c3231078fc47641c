"""Declarations of rollouts: what is read from TOML and JSON, and how wrong fields are refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch_rollout.rollout_file import (
    DEFAULT_STEPS,
    NEWEST,
    WHOLE,
    Compare,
    Declaration,
    Guard,
    OnInconclusive,
    Rollout,
    RolloutStep,
    Shadow,
    as_json,
    check_declaration,
    declaration_warnings,
    duration,
    is_label,
    parse_json,
    parse_toml,
    read_rollout_file,
)

MINUTE = 60_000_000_000
WHOLE_FILE = """
[labels]
stable = 7
champion = 7

[rollout]
candidate = "newest"
steps = ["shadow 100% 10m", "1% 5m", "2.5% 1h30m"]
sticky = ["sequence", "header:X-User-Id", "principal"]
match = ["header:x-beta=1", "principal:qa-*"]
group = "ocr"
keep = "15m"
on_inconclusive = "abort"
override = "none"
[rollout.guard]
requests = 300
failures = 3
errors = 0.01
slower = 0.05
p99_ms = 50
mismatch = 0.001
[rollout.shadow]
inflight = 8
copy_regions = true
compare = { atol = 1e-4, rtol = 1e-5, ignore = ["timestamp"], top1 = ["probabilities"], topk = {scores = 5} }
"""
READ = Declaration(
    {"stable": 7, "champion": 7},
    Rollout(
        candidate=NEWEST,
        steps=(
            RolloutStep(0, WHOLE, 10 * MINUTE),
            RolloutStep(100, 0, 5 * MINUTE),
            RolloutStep(250, 0, 90 * MINUTE),
        ),
        sticky=("sequence", "header:x-user-id", "principal"),
        match=("header:x-beta=1", "principal:qa-*"),
        group="ocr",
        keep_ns=15 * MINUTE,
        on_inconclusive=OnInconclusive.ABORT,
        override=False,
        guard=Guard(300, 3, 0.01, 0.05, 50.0, 0.001),
        shadow=Shadow(8, True, Compare(1e-4, 1e-5, ("timestamp",), ("probabilities",), (("scores", 5),))),
    ),
)

versions = st.integers(1, 2**63 - 1)
names = st.from_regex(r"[a-z][a-z0-9_-]{0,10}", fullmatch=True).filter(lambda name: name != NEWEST)
durations = st.integers(0, 10**7).map(lambda ms: duration(ms * 1_000_000))
shares = st.integers(1, WHOLE)
steps = st.builds(
    lambda shadow, share, least: f"{'shadow ' if shadow else ''}{share / 100:.2f}% {least}",
    st.booleans(),
    shares,
    durations,
)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """Correct fields of any kind."""
    rollout: dict[str, Any] = {}
    if draw(st.booleans()):
        named = draw(st.lists(versions, min_size=2, max_size=4, unique=True))
        cuts = sorted([0, *draw(st.lists(shares, min_size=len(named) - 1, max_size=len(named) - 1)), WHOLE])
        parts = [(high - low) / 100 for low, high in pairwise(cuts)]
        rollout["split"] = dict(zip(map(str, named), parts, strict=True))
    else:
        rollout["steps"] = draw(st.lists(steps, min_size=1, max_size=4))
        rollout["keep"] = draw(durations)
        rollout["candidate"] = draw(st.just(NEWEST) | versions)
        rollout["guard"] = {"errors": draw(st.floats(0, 0.99)), "requests": draw(st.integers(1, 10**6))}
        rollout["on_inconclusive"] = draw(st.sampled_from(["pause", "abort", "advance"]))
        if any(step.startswith("shadow") for step in rollout["steps"]):
            rollout["shadow"] = {"compare": {"ignore": draw(st.lists(names, unique=True))}}
            rollout["guard"]["mismatch"] = draw(st.floats(0, 0.99))
    for key in draw(st.sets(st.sampled_from(["group", "override"]))):
        rollout[key] = {"group": draw(names), "override": "none"}[key]
    rollout["sticky"] = draw(st.lists(names.map("header:{}".format), unique=True))
    content: dict[str, Any] = {"rollout": rollout} if draw(st.booleans()) else {}
    if "split" not in rollout:
        content["labels"] = draw(st.dictionaries(names.filter(lambda name: name != "candidate"), versions))
    return content


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rollout.toml"
    path.write_text(WHOLE_FILE)
    assert read_rollout_file(path) == READ


def test_an_empty_table_has_defaults() -> None:
    rollout = parse_toml("[rollout]", "f").rollout
    assert rollout is not None
    assert tuple(map(str, rollout.steps)) == DEFAULT_STEPS
    assert (rollout.candidate, rollout.keep_ns, rollout.override) == (NEWEST, 15 * MINUTE, True)
    assert parse_toml("", "f") == Declaration()


@given(contents())
def test_declarations_survive_json(content: dict[str, Any]) -> None:
    declaration = parse_json(json.dumps(content), "f")
    again = parse_json(json.dumps(as_json(declaration)), "f")
    assert again == declaration
    if declaration.rollout is not None and again.rollout is not None:
        assert again.rollout.digest == declaration.rollout.digest


@given(contents(), st.data())
def test_each_wrong_field_is_named(content: dict[str, Any], data: st.DataObject) -> None:
    """Whatever correct field is replaced by an object, and wherever an unknown one is added."""
    tables = [("", content)]
    for path, table in tables:
        tables += [
            (f"{path}{key}.", value)
            for key, value in table.items()
            if isinstance(value, dict) and key not in ("split", "labels")
        ]
    path, table = data.draw(st.sampled_from(tables))
    leaves = [key for key, value in table.items() if not isinstance(value, dict)]
    key = data.draw(st.sampled_from([*leaves, "colour"]))
    table[key] = {"a": 1}
    _, problems = check_declaration(content, "repo/m/rollout.toml")
    assert any(problem.path == f"{path}{key}" for problem in problems)
    assert all(problem.message.startswith(f"repo/m/rollout.toml: {problem.path}: ") for problem in problems)
    with pytest.raises(InvalidArgumentError) as raised:
        parse_json(json.dumps(content), "repo/m/rollout.toml")
    assert raised.value.message == problems[0].message


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("rollout = 3", "rollout: must be a table with named fields, not 3"),
        (
            "[labels]\n7 = 7",
            "labels.7: a label is a letter, then up to 63 letters, digits, '_', '-' or '.'; rename it",
        ),
        (
            "[labels]\ncandidate = 7",
            "labels.candidate: this name is the rollout's own; choose another label, not 7",
        ),
        ("[labels]\nx = 0", "labels.x: must be a version, a number from 1, not 0"),
        ("[labels]\nx = true", "labels.x: must be a version, a number from 1, not true"),
        ("[rollout]\nstep = []", "rollout.step: unknown field; did you mean 'steps'?"),
        ("[rollout]\nsteps = []", "rollout.steps: must be a list of 1 to 100 steps, not []"),
        ("[rollout]\nsteps = ['5%']", "rollout.steps[0]: must be a percent from 0.01 to 100 and a duration"),
        ("[rollout]\nsteps = ['5% 1m', '101% 1m']", "rollout.steps[1]: must be a percent"),
        ("[rollout]\nsteps = ['0% 1m']", "rollout.steps[0]: must be a percent"),
        ("[rollout]\nsteps = ['1% 9999d']", "rollout.steps[0]: must be a percent"),
        ("[rollout]\nkeep = 15", 'rollout.keep: must be a duration such as "15m", not 15'),
        ("[rollout]\nsticky = ['user']", 'rollout.sticky[0]: must be "sequence", "principal" or'),
        ("[rollout]\nmatch = ['header:x']", 'rollout.match[0]: must be "header:NAME=VALUE" or'),
        ("[rollout]\nmatch = ['principal:a', 'principal:a']", "rollout.match[1]: is given twice; remove one"),
        ("[rollout]\nsplit = {7 = 50}", "rollout.split: must have 2 to 16 versions whose percents add up"),
        ("[rollout]\nsplit = {7 = 50, 8 = 49.5}", "rollout.split: must have 2 to 16 versions"),
        ("[rollout]\nsplit = {7 = 50, x = 50}", "rollout.split.x: the names in a split are versions"),
        ("[rollout]\nsplit = {7 = 33.333, 8 = 66.667}", "rollout.split.7: must be a percent"),
        ("[rollout]\nsplit = {7 = 50, 8 = 50}\nkeep = '1m'", "rollout.keep: has no effect with a split"),
        (
            "[labels]\nstable = 9\n[rollout]\nsplit = {7 = 50, 8 = 50}",
            "rollout.split: must contain version 9",
        ),
        ("[rollout.guard]\nslower = 0.005", "rollout.guard.slower: must be a share from 0.01 to below 1"),
        ("[rollout.guard]\nerrors = nan", "rollout.guard.errors: must be a share from 0 to below 1"),
        (
            '[rollout.shadow.compare]\nignore = ["a"]\ntopk = { a = 3 }',
            "rollout.shadow.compare.topk: output 'a' is in ignore too; remove it from one of them",
        ),
        (
            "[rollout.shadow.compare.topk]\na = 0",
            "rollout.shadow.compare.topk.a: must be a number from 1, not 0",
        ),
        ("[rollout.guard]\nmismatch = 0.1", "rollout.guard.mismatch: compares shadow pairs; add a step"),
        ("[rollout.guard]\nrequests = 9", "rollout.guard.requests: has no effect without a limit"),
        ("[rollout.shadow]\ninflight = 4", 'rollout.shadow: needs a step such as "shadow 100% 10m"'),
        ("[rollout]\noverride = 2026-01-01", 'rollout.override: must be "any" or "none", not 2026-01-01'),
    ],
)
def test_wrong_fields_are_refused_with_the_fix(toml: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse_toml(toml, "m/rollout.toml")
    assert raised.value.message.startswith(f"m/rollout.toml: {message}")


def test_doubts_are_about_what_is_allowed() -> None:
    good = parse_toml("[labels]\nstable = 7\n[rollout]\ncandidate = 8\ngroup = 'ocr'", "f")
    assert good.rollout is not None
    assert list(declaration_warnings(good, "f", (7, 8), {"n": good.rollout})) == []
    text = """
        labels = { best = 6 }
        [rollout]
        candidate = 9
        steps = ["5% 1m", "shadow 1% 1m", "1% 1m"]
        group = "ocr"
    """
    bad = parse_toml(text, "f")
    assert [each.message for each in declaration_warnings(bad, "f", (7, 8), {"n": good.rollout})] == [
        "f: labels.best: version 6 has no directory; the label waits for it",
        "f: rollout.candidate: version 9 has no directory",
        "f: rollout.steps[2]: falls from 5% to 1%; steps should grow",
        "f: rollout.steps: differ from those of 'n', which is in the same group; give both the same steps",
    ]
    split = parse_toml("[rollout]\nsplit = {7 = 50, 8 = 30, 9 = 20}", "f")
    assert [each.path for each in declaration_warnings(split, "f", (7, 8), {})] == ["rollout.split.9"]


def test_what_is_no_declaration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout.toml"
    with pytest.raises(InvalidArgumentError, match=r"rollout\.toml can't be read: No such file"):
        read_rollout_file(path)
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgumentError, match="is not UTF-8"):
        read_rollout_file(path)
    with pytest.raises(InvalidArgumentError, match="f is not TOML: "):
        parse_toml("[rollout", "f")
    with pytest.raises(InvalidArgumentError, match="f is not JSON: "):
        parse_json("{", "f")
    with pytest.raises(InvalidArgumentError, match="f: must be a table with named fields, not \\[\\]"):
        parse_json("[]", "f")


def test_a_split_begins_with_stable() -> None:
    text = "[rollout]\nsplit = {7 = 12.5, 8 = 87.5}"
    for stable, split in ((None, ((7, 1250), (8, 8750))), (8, ((8, 8750), (7, 1250)))):
        labels = f"[labels]\nstable = {stable}\n" if stable else ""
        rollout = parse_toml(labels + text, "f").rollout
        assert rollout is not None and rollout.split == split


@given(st.text(max_size=70))
def test_labels_are_never_versions(text: str) -> None:
    if is_label(text):
        assert text.isascii() and text[0].isalpha() and len(text) <= 64
        assert not text.isdigit()
