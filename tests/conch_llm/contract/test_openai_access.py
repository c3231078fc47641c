"""Access to OpenAI's routes: API keys, restricted routes, the access policy, and the port of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.support.llm_models import write_words
from tests.support.servers import WAIT_S, client_of, free_port, serving

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ASKED = {"model": "words", "prompt": "a b"}
POLICY = """
[[principal]]
name = "speaker"
key_file = "speaker"
infer = ["words"]

[[principal]]
name = "reader"
key_file = "reader"
read = ["*"]

[[principal]]
name = "limited"
key_file = "limited"
infer = ["*"]
requests_per_second = 1
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def asking(directory: Path, flags: Sequence[str], port: int | None = None) -> Iterator[httpx.Client]:
    """A client of a server with two text models."""
    write_words(directory / "models")
    write_words(directory / "models", "other")
    with serving(directory / "models", flags=flags) as server:
        with client_of(server) as client:
            assert client.is_server_live()
        address = server.http_address if port is None else f"127.0.0.1:{port}"
        with httpx.Client(base_url=f"http://{address}", timeout=WAIT_S) as made:
            yield made


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    found: dict[str, Any] = response.json()["error"]
    return response.status_code, found["type"], found["code"]


def test_an_api_key_is_a_bearer_token_or_a_header(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key-of-a-file\n\n  other-key-of-it \n")
    flags = ["--openai-api-key=key-of-a-flag", f"--openai-api-key-file={tmp_path / 'keys'}"]
    with asking(tmp_path, flags) as http:
        for key in ("key-of-a-flag", "key-of-a-file", "other-key-of-it"):
            for headers in (bearer(key), {"api-key": key}):
                assert http.post(COMPLETIONS, json=ASKED, headers=headers).status_code == 200
        for headers in (
            {},
            bearer("key-of-a-fla"),
            {"Authorization": "Basic key-of-a-flag"},
            {"api-key": "keys"},
            {**bearer("key-of-a-flag"), "api-key": "key-of-a-flag"},
        ):
            for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/models/words")):
                refused = http.request(method, path, headers=headers)
                assert error_of(refused) == (401, "authentication_error", "invalid_api_key")
                assert refused.headers["www-authenticate"] == "Bearer"
                assert "key-of" not in refused.text
        assert http.get("/health").status_code == 200
        assert http.get("/v2/models/words/ready").status_code == 200  # REST has its own rules


def test_restricted_routes_need_their_header(tmp_path: Path) -> None:
    flags = ["--openai-restricted-api=inference:x-secret=sésame", "--http-restricted-api=health:x-health=1"]
    with asking(tmp_path, flags) as http:
        refused = http.post(COMPLETIONS, json=ASKED)
        assert error_of(refused)[0] == 401
        assert (
            refused.json()["error"]["message"]
            == "This API is restricted, expecting header 'x-secret' with valid value"
        )
        sesame = httpx.Headers({"x-secret": "sésame"}, encoding="utf-8")
        assert http.post(COMPLETIONS, json=ASKED, headers=sesame).status_code == 200
        assert http.get("/v1/models").status_code == 200
        assert http.get("/health").status_code == 401
        assert http.get("/health", headers={"x-health": "1"}).status_code == 200


def test_the_policy_holds_for_models_by_role(tmp_path: Path) -> None:
    for name in ("speaker", "reader", "limited"):
        (tmp_path / name).write_text(f"the-key-of-the-{name}")
    (tmp_path / "access.toml").write_text(POLICY)
    speaker, reader, limited = (bearer(f"the-key-of-the-{name}") for name in ("speaker", "reader", "limited"))
    denied = (403, "permission_error", "model_not_allowed")
    with asking(tmp_path, [f"--access-policy={tmp_path / 'access.toml'}"]) as http:
        assert error_of(http.post(COMPLETIONS, json=ASKED)) == (
            401,
            "authentication_error",
            "invalid_api_key",
        )
        assert http.post(COMPLETIONS, json=ASKED, headers=speaker).status_code == 200
        key = {"api-key": "the-key-of-the-speaker"}
        assert http.post(COMPLETIONS, json=ASKED, headers=key).status_code == 200
        # A model that is not there is refused as one that is not allowed.
        for model in ("other", "nothing"):
            asked = {**ASKED, "model": model}
            assert error_of(http.post(COMPLETIONS, json=asked, headers=speaker)) == denied
        assert error_of(http.post(COMPLETIONS, json=ASKED, headers=reader)) == denied
        assert [each["id"] for each in http.get("/v1/models", headers=speaker).json()["data"]] == ["words"]
        assert error_of(http.get("/v1/models/other", headers=speaker)) == denied
        assert len(http.get("/v1/models", headers=reader).json()["data"]) == 2
        found = [http.post(COMPLETIONS, json=ASKED, headers=limited) for _ in range(6)]
        last = next(each for each in found if each.status_code != 200)
        assert error_of(last) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert int(last.headers["retry-after-ms"]) <= 1000 * int(last.headers["retry-after"])
        assert last.headers["x-should-retry"] == "true"


def test_a_response_that_is_kept_is_its_principals(tmp_path: Path) -> None:
    policy = "".join(
        f'[[principal]]\nname = "{name}"\nkey_file = "{name}"\ninfer = ["words"]\n' for name in ("ann", "bob")
    )
    for name in ("ann", "bob"):
        (tmp_path / name).write_text(f"the-key-of-{name}-only")
    (tmp_path / "access.toml").write_text(policy)
    ann, bob = (bearer(f"the-key-of-{name}-only") for name in ("ann", "bob"))
    flags = [f"--access-policy={tmp_path / 'access.toml'}", "--openai-store-bytes=65536"]
    with asking(tmp_path, flags) as http:
        made = http.post(RESPONSES, json={"model": "words", "input": "a"}, headers=ann).json()["id"]
        on: dict[str, Any] = {"model": "words", "input": "b", "previous_response_id": made}
        assert http.post(RESPONSES, json=on, headers=ann).status_code == 200
        refused = http.post(RESPONSES, json=on, headers=bob)
        assert error_of(refused) == (400, "invalid_request_error", "previous_response_not_found")
        for method in ("GET", "DELETE"):
            missing = http.request(method, f"{RESPONSES}/{made}", headers=bob)
            assert error_of(missing) == (404, "invalid_request_error", "response_not_found")
        assert http.get(f"{RESPONSES}/{made}").status_code == 401
        assert http.get(f"{RESPONSES}/{made}", headers=ann).json()["id"] == made


def test_a_port_of_its_own_has_these_routes_only(tmp_path: Path) -> None:
    port = free_port()
    flags = [f"--openai-port={port}", "--allow-openai=false", "--openai-api-key=a-key"]
    with asking(tmp_path, flags, port) as http:
        assert http.post(COMPLETIONS, json=ASKED, headers=bearer("a-key")).status_code == 200
        assert http.post(COMPLETIONS, json=ASKED).status_code == 401
        for path in ("/v2", "/v2/health/live", "/v2/models/words", "/", "/docs/index.md"):
            assert http.get(path, headers=bearer("a-key")).status_code == 404, path
    with asking(tmp_path, ["--allow-openai=false"]) as http:
        assert http.get("/v1/models").json() == {"error": "Not Found"}
