"""`conch access`: makes keys for an access policy, and checks a policy without a server."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from conch.access.policy_file import PrincipalEntry, read_policy
from conch.access.principals import Role
from conch.cli.command_parser import CommandParser
from conch.core.errors import InvalidArgumentError
from conch.process.banner import table

_KEY_BYTES = 32


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the process's exit code."""
    given = make_parser().parse_args(list(arguments))
    return _print_key() if given.command == "key" else _check(given.policy)


def make_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(prog="conch access", description="Helps to write a policy for --access-policy.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("key", help="make a key at random, and print it with its hash for key_sha256")
    check = commands.add_parser(
        "check", help="check a policy and the files it names, and print its principals"
    )
    check.add_argument("policy", type=Path, metavar="FILE", help="the policy file")
    return parser


def _print_key() -> int:
    key = secrets.token_urlsafe(_KEY_BYTES)
    print(f"key        {key}\nkey_sha256 {sha256(key.encode()).hexdigest()}")
    return 0


def _check(path: Path) -> int:
    try:
        policy = read_policy(path)
    except InvalidArgumentError as error:
        print(error.message, file=sys.stderr)
        return 1
    for text in () if policy.keys is None else policy.keys.left_out:
        print(f"left out of the keys that sign tokens: {text}", file=sys.stderr)
    print(table(["Principal", "Known by", *Role, "Limits"], [_row(each) for each in policy.principals]))
    return 0


def _row(entry: PrincipalEntry) -> list[str]:
    ways = [f"{len(entry.keys)} keys" if len(entry.keys) > 1 else "a key"] if entry.keys else []
    ways += [f"token: {name}={value}" for name, value in entry.claims.items()]
    ways += entry.certificates
    ways += ["no credentials"] if entry.anonymous else []
    limits = entry.limits
    texts = [
        f"{value:g} {what}"
        for value, what in (
            (limits.requests_per_second, "requests/s"),
            (limits.bytes_per_second, "bytes/s"),
            (limits.concurrent, "at a time"),
        )
        if value is not None
    ]
    models = ["\n".join(entry.models.get(role, ())) for role in Role]
    return [entry.name, "\n".join(ways), *models, "\n".join(texts)]
