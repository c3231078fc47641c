"""The flags of OpenAI's routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.cli.settings.settings_reader import read_flags
from conch.process.exposure import exposure
from conch.server_options import PartOptions
from conch.server_settings import build_options
from conch.settings.option import FlagError
from conch_llm.llm_options import LlmOptions
from conch_llm.openai_provider import OpenAiRoutes


def built(*flags: str) -> PartOptions:
    return build_options(read_flags(["--model-repository=/models", *flags], {}))


def added(options: PartOptions) -> LlmOptions | None:
    found = options.add_ons.get("llm")
    assert found is None or isinstance(found, LlmOptions)
    return found


def test_the_routes_are_behind_rest_by_default() -> None:
    options = built()
    assert options.http is not None
    assert OpenAiRoutes in map(type, options.http.further)
    assert options.http.platform is None
    llm = added(options)
    assert llm is not None and llm.port is None and llm.ports == ()


def test_a_port_of_its_own_has_the_address_and_rules_of_rest() -> None:
    options = built(
        "--openai-port=9000",
        "--http-address=127.0.0.1",
        "--http-restricted-api=inference:a=1",
        "--openai-restricted-api=health:b=2",
    )
    llm = added(options)
    assert llm is not None and llm.port is not None
    assert (llm.port.address, llm.port.port, llm.port.further) == ("127.0.0.1", 9000, ())
    assert llm.port.restrictions == {"inference": ("a", "1"), "health": ("b", "2")}
    assert isinstance(llm.port.platform, OpenAiRoutes)
    assert 9000 in options.ports


def test_the_sentence_on_what_is_open_has_the_port() -> None:
    assert "all clients (gRPC, HTTP, OpenAI)" in exposure(built("--openai-port=9000"))
    assert "clients with an API key (OpenAI)" in exposure(built("--openai-port=9000", "--openai-api-key=abc"))


def test_off_is_off() -> None:
    options = built("--allow-openai=false")
    assert options.http is not None
    assert not any(isinstance(each, OpenAiRoutes) for each in options.http.further)
    assert added(options) is None
    assert added(built("--allow-http=false")) is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--allow-openai=false", "--openai-api-key=a"], "--openai-api-key needs --allow-openai"),
        (["--allow-http=false", "--default-max-tokens=9"], "--default-max-tokens needs --allow-openai"),
        (["--openai-port=8000"], "The server cannot listen to"),
        (["--openai-api-key="], "--openai-api-key: a key is printable ASCII"),
        (["--openai-api-key=a b"], "--openai-api-key: a key is printable ASCII"),
        (["--openai-api-key-file=/nowhere"], "--openai-api-key-file: /nowhere can't be read"),
        (["--openai-restricted-api=inference"], "is not of the form"),
        (["--openai-restricted-api=trace:a=1"], "unknown restricted api 'trace'"),
        (
            ["--openai-restricted-api=health:a=1", "--openai-restricted-api=health:a=2"],
            "multiple config groups",
        ),
        (["--openai-tokenizer=/nowhere"], "--openai-tokenizer: /nowhere is no directory"),
        (["--chat-template=/nowhere"], "--chat-template: /nowhere can't be read"),
        (["--default-max-tokens=0"], "must be at least 1"),
        (["--tool-call-parser=none"], "must be one of functiongemma, gemma4, glm, hermes"),
        (["--backend=vllm"], "the config of each model tells what inputs it has"),
        (["--host=0.0.0.0"], "--http-address"),
        (["--kserve-http-port=8000"], "--http-port"),
        (["--uvicorn-log-level=debug"], "--log-verbose"),
    ],
)
def test_flags_without_effect_or_meaning_are_refused(flags: list[str], text: str) -> None:
    with pytest.raises(FlagError) as caught:
        built(*flags)
    assert text in str(caught.value)


def test_tritons_flags_with_the_same_meaning_are_taken(tmp_path: Path) -> None:
    built(f"--tokenizer={tmp_path}", "--enable-kserve-frontends", "--max-tool-call-parse-bytes=131072")


def test_keys_are_not_shown(tmp_path: Path) -> None:
    settings = read_flags(["--openai-api-key=hush", "--openai-restricted-api=health:a=hush"], {})
    for name in ("openai-api-key", "openai-restricted-api"):
        (found,) = (each for each in settings.definitions if each.name == name)
        assert "hush" not in found.text(settings[name])


def test_a_policy_has_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-long-enough-key")
    (tmp_path / "access.toml").write_text('[[principal]]\nname = "a"\nkey_file = "key"\ninfer = ["*"]\n')
    with pytest.raises(FlagError, match="with --access-policy clients send its keys"):
        built(f"--access-policy={tmp_path / 'access.toml'}", "--openai-api-key=abc")
