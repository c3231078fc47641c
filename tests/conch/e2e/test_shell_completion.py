"""`conch completion`: what shells offer."""

from __future__ import annotations

import subprocess

import pytest
from tests.support.servers import WAIT_S

from conch.cli.completion_command import script
from conch.server_settings import SETTINGS

COMPLETE = """
eval "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_conch
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(*words: str) -> set[str]:
    """Completions of bash for the last word of a command line."""
    done = subprocess.run(
        ["bash", "-uc", COMPLETE, "bash", script("bash"), *words],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["conch", ""],
            {
                "serve",
                "config",
                "access",
                "models",
                "rollout",
                "control",
                "check",
                "trace",
                "infer",
                "top",
                "perf",
                "pull",
                "run",
                "convert",
                "profile",
                "optimize",
                "tune",
                "completion",
                "--help",
                "--version",
            },
        ),
        (["conch", "mo"], {"models"}),
        (["conch", "completion", ""], {"bash", "zsh", "--help"}),
        (["conch", "serve", "--model-control"], {"--model-control-mode"}),
        (["conch", "serve", "--model-control-mode", ""], {"none", "explicit", "on-demand", "poll", "watch"}),
        (["conch", "serve", "--model-control-mode", "=", "ex"], {"explicit"}),
        (["conch", "serve", "--allow-http", "="], {"true", "false"}),
        (["conch", "serve", "--allow-http=f"], {"--allow-http=false"}),
        (["conch", "serve", "--log-file", ""], set()),
        (
            ["conch", "models", ""],
            {"list", "describe", "load", "preload", "unload", "label", "watch", "drain", "--help"},
        ),
        (["conch", "models", "load", "list", "--co"], {"--config"}),
        (["conch", "control", "--model-control-mode", "w"], {"watch"}),
        (["conch", "check", "--str"], {"--strict"}),
        (["conch", "serve", "--host-pol"], {"--host-policy"}),
    ],
)
def test_what_is_offered(words: list[str], expected: set[str]) -> None:
    assert offered(*words) == expected


def test_every_flag_is_offered() -> None:
    names = {each.flag for each in SETTINGS if each.listed}
    assert offered("conch", "serve", "--") == {*names, "--help"}
    assert offered("conch", "config", "--") == {*names, "--help", "--json"}
