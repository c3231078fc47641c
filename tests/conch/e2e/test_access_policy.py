"""`conch serve` with an access policy: mistakes at the start, logs, and changes of a mounted file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from tests.support.servers import copy_example, eventually, serving_process, started

KEY = "a-key-that-is-long-enough"


def test_a_mistake_keeps_the_server_from_starting(tmp_path: Path) -> None:
    copy_example(tmp_path / "models", "simple")
    policy = tmp_path / "access.toml"
    policy.write_text('[[principal]]\nname = "web"\nkey_sha256 = "ab"\ninfer = ["*"]\n')
    good = tmp_path / "good.toml"
    good.write_text('[[principal]]\nname = "all"\nanonymous = true\ninfer = ["*"]\n')
    for flags, error in (
        (
            [f"--access-policy={good}", "--allow-sagemaker=true"],
            "--access-policy does not hold for the routes of",
        ),
        (
            [f"--access-policy={policy}"],
            f"--access-policy: {policy}:3: principal 'web': key_sha256 must be SHA-256",
        ),
        (["--audit-log=-"], "it needs --access-policy"),
    ):
        with started(f"--model-repository={tmp_path}/models", *flags) as server:
            assert server.wait() == 1
            assert error in server.errors


def test_logs_name_principals_and_no_keys(tmp_path: Path) -> None:
    copy_example(tmp_path / "models", "simple")
    policy, key = tmp_path / "access.toml", tmp_path / "key"
    policy.write_text('[[principal]]\nname = "web"\nkey_file = "key"\ninfer = ["simple"]\n')
    key.write_text(KEY)
    flags = [f"--access-policy={policy}", "--audit-log=-", f"--access-log={tmp_path}/log", "--log-verbose=1"]
    with serving_process(tmp_path / "models", flags=flags) as server:
        url = f"http://{server.http_address}/v2/models"
        asked: dict[str, Any] = {"headers": {"authorization": f"Bearer {KEY}"}, "json": {}}
        assert httpx.post(f"{url}/simple/infer", **asked).status_code == 500
        assert httpx.post(f"{url}/other/infer", **asked).status_code == 403
        key.write_text(f"{KEY}-2")
        eventually(lambda: httpx.post(f"{url}/simple/infer", **asked).status_code == 401, "it is reloaded")
        eventually(lambda: server.standard_output.count("\n") > 1, "it is audited")
        lines = [json.loads(line) for line in server.standard_output.splitlines()]
        assert (lines[0]["principal"], lines[0]["model"]) == ("web", "other")
        assert lines[-1]["code"] == "UNAUTHENTICATED"
        eventually(lambda: "the access policy was reloaded" in server.errors, "the reload is logged")
        texts = server.errors + server.standard_output
    requests = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert requests[0]["principal"] == "web"
    assert [requests[-1].get("principal"), requests[-1]["code"]] == [None, "UNAUTHENTICATED"]
    assert KEY not in texts + (tmp_path / "log").read_text()
