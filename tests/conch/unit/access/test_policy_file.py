"""Policy files: what is in them, and errors that say where the mistake is and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.tokens import Issuer

from conch.access.policy_file import read_policy
from conch.access.principals import EVERY_MODEL, ModelPatterns, Role
from conch.access.request_limits import RequestLimits
from conch.cli.access_command import run
from conch.core.errors import InvalidArgumentError

KEY = "k" * 16
PRINCIPAL = '[[principal]]\nname = "web"\nkey_file = "web.key"\n'
INFERS = PRINCIPAL + 'infer = ["*"]\n'
JWT = '[jwt]\nissuer = "i"\naudience = "a"\njwks_file = "jwks.json"\n'
TOKENS = '[[principal]]\nname = "users"\nclaims = { sub = "u" }\ninfer = ["*"]\n'


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "web.key").write_text(f"# now\n{KEY}\n\n{KEY}2\n")
    (tmp_path / "short.key").write_text("secret\n")
    (tmp_path / "empty.key").write_text("\n")
    (tmp_path / "jwks.json").write_bytes(Issuer().jwks)
    return tmp_path


def write(directory: Path, text: str) -> Path:
    path = directory / "access.toml"
    path.write_text(text)
    return path


def test_all_of_a_policy(directory: Path) -> None:
    text = f"""
        {JWT}clock_skew_seconds = 5
        [[principal]]
        name = "web"
        key_file = "web.key"
        key_sha256 = "{"0a" * 32}"
        certificate = ["cn:web", "uri:spiffe://a/b"]
        infer = ["digits*", "simple"]
        read = ["*"]
        requests_per_second = 2.5
        concurrent = 3
        bytes_per_second = 1_000_000
        cold_loads_per_minute = 0.5
        [[principal]]
        name = "users"
        claims = {{ sub = "u", groups = "ml" }}
        control = "staging-*"
    """
    policy = read_policy(write(directory, text))
    web, users = policy.principals
    assert policy.jwt is not None
    assert (policy.jwt.audiences, policy.jwt.clock_skew_s, policy.certificates) == (("a",), 5.0, True)
    assert (len(web.keys), web.keys[2], web.limits) == (3, b"\n" * 32, RequestLimits(2.5, 1_000_000, 3, 0.5))
    assert web.models == {Role.INFER: ("digits*", "simple"), Role.READ: ("*",)}
    assert (users.claims, users.models) == ({"sub": "u", "groups": "ml"}, {Role.CONTROL: ("staging-*",)})
    assert run(["check", str(directory / "access.toml")]) == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[principal]\n", ": the access policy is no TOML: Expected ']]' at the end of an array"),
        ("", ":1: principal must be one or more tables [[principal]]"),
        ("principals = 1\n", ":1: principals is unknown: a policy has [[principal]] tables and"),
        (INFERS + "[metrics]\n", ":5: metrics is unknown"),
        ('[[principal]]\ninfer = ["*"]\n', ":1: [[principal]]: name is missing"),
        ('[[principal]]\nname = "a b"\n', ":2: [[principal]]: name must be 1 to 100 of the characters"),
        ('[[principal]]\nname = "a"\ninfer = ["*"]\n', ":2: principal 'a': name has no credentials: give"),
        (PRINCIPAL, ":2: principal 'web': name has no role: give patterns of models, such as infer"),
        (INFERS + "infers = 1\n", ":5: principal 'web': infers is unknown: known are name, key_file"),
        (INFERS + "concurrent = 1.5\n", ":5: principal 'web': concurrent must be a whole number from 1 to"),
        (INFERS + "requests_per_second = 0\n", "'web': requests_per_second must be a number from 0.001 to"),
        (INFERS + "bytes_per_second = inf\n", "'web': bytes_per_second must be a number from 0.001 to"),
        (INFERS + "concurrent = 1" + "0" * 400, "'web': concurrent must be a whole number from 1 to 1e+15"),
        (INFERS + "requests_per_second = 1e-320\n", "from 0.001 to 1e+15"),
        (INFERS.replace("web.key", "a\\u0000"), "key_file names {directory}/a\0, which can't be read"),
        ("a = " + "[" * 100_000, ": the access policy is no TOML: maximum recursion depth"),
        (INFERS + 'read = [""]\n', ":5: principal 'web': read must be a list of texts"),
        (INFERS + INFERS, ":6: principal 'web': name occurs twice"),
        (INFERS + INFERS.replace('"web"', '"b"'), "key_file is also given for principal 'web'"),
        (INFERS.replace("web.key", "none.key"), "key_file names {directory}/none.key, which"),
        (INFERS.replace("web.key", "short.key"), "key_file names {directory}/short.key, in"),
        (INFERS.replace("web.key", "empty.key"), "which has no key: write one key on a line"),
        (INFERS + 'key_sha256 = ["ab"]\n', ":5: principal 'web': key_sha256 must be SHA-256"),
        (INFERS + 'certificate = "web"\n', "certificate must be names as in a certificate"),
        (INFERS + 'anonymous = "yes"\n', ":5: principal 'web': anonymous must be true or false"),
        (TOKENS, ":3: principal 'users': claims needs a table [jwt]"),
        (JWT + INFERS, ":2: [jwt]: issuer has no effect: give a principal 'claims'"),
        (JWT.replace('"a"', "[]") + TOKENS, ":3: [jwt]: audience is missing"),
        (JWT + 'jwks_url = "https://a"\n' + TOKENS, ":2: [jwt]: issuer needs either jwks_file or jwks_url"),
        (JWT + "clock_skew_seconds = 3600\n" + TOKENS, "[jwt]: clock_skew_seconds must be a number from"),
        (JWT.replace("jwks.json", "web.key") + TOKENS, "[jwt]: jwks_file names {directory}/web.key: no JWK"),
        (
            JWT.replace('jwks_file = "jwks.json"', 'jwks_url = "https://[a"') + TOKENS,
            ":4: [jwt]: jwks_url must begin with https://",
        ),
        (
            JWT.replace('jwks_file = "jwks.json"', 'jwks_url = "https://a:99999"') + TOKENS,
            ":4: [jwt]: jwks_url must begin with https://",
        ),
        (
            JWT.replace('jwks_file = "jwks.json"', 'jwks_url = "http://a.example"') + TOKENS,
            ":4: [jwt]: jwks_url must begin with https://",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_place(
    directory: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    path = write(directory, text)
    with pytest.raises(InvalidArgumentError) as refused:
        read_policy(path)
    assert error.format(directory=directory) in refused.value.message
    assert refused.value.message.startswith(str(path))
    assert "secret" not in refused.value.message
    assert run(["check", str(path)]) == 1
    assert refused.value.message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("patterns", "model", "matches"),
    [
        (["*"], EVERY_MODEL, True),
        (["*"], "team::m", True),
        (["?"], EVERY_MODEL, False),
        (["digits*"], EVERY_MODEL, False),
        (["digits*"], "digits_2", True),
        (["digits*"], "Digits", False),
        (["digits*"], "/digits::secret", False),
        (["secret"], "/a/digits::secret", True),
        (["secret"], "s3://digits::secret", True),
        (["secret"], "digits::secret", False),
        (["secret"], "/digits::x::secret", False),
        (["x::secret"], "x::secret", True),
        (["secret"], "/secret", False),
        (["digits::*"], "digits::secret", True),
        (["digits::*"], "digits", False),
        (["[ab]"], "a", False),
        (["[ab]"], "[ab]", True),
        (["a.c"], "abc", False),
        (["a"], "a\n", False),
        ([], "a", False),
    ],
)
def test_patterns_of_models(patterns: list[str], model: str, matches: bool) -> None:
    assert ModelPatterns(patterns).match(model) is matches
