"""Chat templates: prompts, places, limits and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_templates import CALLED, CASES, GEMMA, HERMES, MISTRAL, QWEN, TemplateCase

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_llm.language import chat_template
from conch_llm.language.chat_template import ChatTemplate, load_chat_template, takes_parts

USER = [{"role": "user", "content": "hi"}]


def render(template: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate({"default": template}).render(messages, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prompts(case: TemplateCase) -> None:
    template = ChatTemplate({"default": case.template}, case.special_tokens)
    prompt = template.render(
        case.messages,
        tools=case.tools,
        add_generation_prompt=case.add_generation_prompt,
        chat_template_kwargs=case.kwargs,
    )
    assert prompt == case.prompt


LLAMA3_TOOLS = """{% if tools %}<|start_header_id|>user<|end_header_id|>
Respond in the format {"name": function name, "parameters": dictionary of arguments}.{% endif %}"""


@pytest.mark.parametrize(
    ("templates", "parser"),
    [
        ({"default": HERMES.template}, "hermes"),
        ({"default": MISTRAL.template}, "mistral"),
        ({"default": LLAMA3_TOOLS}, "llama3"),
        ({"default": QWEN.template, "tool_use": HERMES.template}, "hermes"),
        ({"default": HERMES.template, "tool_use": MISTRAL.template}, "mistral"),
        ({"default": GEMMA.template}, ""),
        ({"default": LLAMA3_TOOLS.replace("tools", "never")}, ""),
        ({"default": HERMES.template + "<function="}, "qwen3_coder"),
        ({"default": HERMES.template + "<arg_key>"}, "glm"),
        ({"default": MISTRAL.template + "[ARGS]"}, "mistral_args"),
        ({"default": GEMMA.template + "{{ tools }}<start_function_call>"}, "functiongemma"),
        ({"default": GEMMA.template + "{{ tools }}<|tool_call>"}, "gemma4"),
    ],
)
def test_the_parser_of_tool_calls_follows_from_the_template(templates: dict[str, str], parser: str) -> None:
    assert ChatTemplate(templates).tool_parser == parser


@pytest.mark.parametrize(
    "loop",
    [
        "{% for part in message.content %}{% endfor %}",
        "{% for part in message['content'] | list %}{% endfor %}",
        "{% set a = message.content %}{% set b = a or [] %}{% for part in b %}{% endfor %}",
        "{% macro show(x, y) %}{% for part in y %}{% endfor %}{% endmacro %}{{ show(1, message.content) }}",
        "{% for part in message.content if part.type == 'text' %}{% endfor %}",
    ],
)
def test_templates_that_take_parts(loop: str) -> None:
    assert takes_parts("{% for message in messages %}" + loop + "{% endfor %}")


@pytest.mark.parametrize(
    "use",
    [
        "{{ message.content }}",
        "{% for line in message.content.split('x') %}{% endfor %}",
        "{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}",
    ],
)
def test_templates_that_take_text(use: str) -> None:
    assert not takes_parts("{% for message in messages %}" + use + "{% endfor %}")


def test_content_takes_the_form_of_the_template() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    looping = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"
    assert render(looping, parts) == "<a><b>"
    assert render(looping) == "<hi>"
    assert ChatTemplate({"default": GEMMA.template}).render(USER).startswith("<start_of_turn>user\nhi<end")


QWEN3_TURN = (
    "{% for m in messages[::-1] %}{% endfor %}{% for m in messages %}"
    "{% if '</think>' in m.content %}x{% endif %}{{ m.content.lstrip('\\n') }}"
    "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% if m.refusal is defined %}refused{% endif %}{% endfor %}"
)
"""Uses of a turn as in Qwen3's template."""
PARTS = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}])
def test_a_turn_of_calls_alone_is_an_empty_text(content: Any, arguments: Any) -> None:
    """As clients send back what they got, with a null for each member that was not there."""
    call = {"id": "1", "type": "function", "function": {"name": "f", **arguments}}
    turn = {"role": "assistant", "tool_calls": [call], "refusal": None, **content}
    assert render(QWEN3_TURN, [turn]) == "{}"
    assert render(PARTS, [turn]).strip("<>") == ""
    nones: list[Any] = [None, []]
    for none in nones:
        assert render(QWEN3_TURN, [{**turn, "content": "a", "tool_calls": none}]) == "a"
        assert render("{{ 'tool_calls' in messages[0] }}", [{**turn, "tool_calls": none}]) == "False"


def test_a_picture_for_a_template_of_text_is_refused() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\.content\[0\]: .* takes text only"):
        render("{{ messages[0].content }}", messages)


def test_arguments_that_are_no_json_are_refused_and_messages_stay_as_they_are() -> None:
    before = json.dumps(CALLED)
    ChatTemplate({"default": MISTRAL.template}).render(CALLED)
    assert json.dumps(CALLED) == before
    broken = json.loads(before.replace(": \\", " \\"))
    with pytest.raises(InvalidArgumentError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        ChatTemplate({"default": MISTRAL.template}).render(broken)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages + 1 }}", "chat template: .*list"),
        ("{{ missing.field }}", "chat template: 'missing' is undefined"),
        ("{{ messages.append(1) }}", "chat template: .*append.* unsafe"),
        ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
        ("{% for i in range(1000000) %}{% endfor %}", "chat template: Range too big"),
        ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "more than 1048576 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template: "),
    ],
)
def test_failures_of_templates_are_errors_of_the_request(template: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        render(template)


def test_a_template_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.05)
    slow = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{{ i }}{% endfor %}"
    with pytest.raises(InvalidArgumentError, match=r"longer than 0\.05 s"):
        render(slow)


def test_fields_of_the_request_are_no_variables_of_it() -> None:
    assert render("{{ a }}{{ bos_token }}", chat_template_kwargs={"a": 1}) == "1"
    with pytest.raises(InvalidArgumentError, match="chat_template_kwargs: tools is a field"):
        render("", chat_template_kwargs={"tools": []})


def test_helpers_of_templates() -> None:
    assert render("{{ strftime_now('%%') }}") == "%"
    assert render("{{ {'b': '<ü>', 'a': 1} | tojson }}") == '{"b": "<ü>", "a": 1}'
    assert render("{{ {'b': 'ü', 'a': 1} | tojson(True, separators=(',', ':'), sort_keys=True) }}") == (
        '{"a":1,"b":"\\u00fc"}'
    )
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_a_malformed_template_names_its_line() -> None:
    with pytest.raises(InvalidArgumentError, match="chat template 'default', line 2: "):
        ChatTemplate({"default": "\n{% if %}"})


def test_places_in_order(tmp_path: Path) -> None:
    version, folder = tmp_path / "model" / "1", tmp_path / "model" / "tokens"
    version.mkdir(parents=True)
    folder.mkdir()
    assert load_chat_template(version, tokenizer="tokens") is None

    tokens = {"bos_token": {"content": "<s>"}, "eos_token": None, "additional_special_tokens": ["<a>"]}
    named = [
        {
            "name": "default",
            "template": "config {{ bos_token }}{{ eos_token }}{{ additional_special_tokens[0] }}",
        },
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": named}))
    found = load_chat_template(version, tokenizer="tokens")
    assert found and found.render(USER) == "config <s><a>"
    assert found.render(USER, tools=[{}, {}]) == "tools 2"
    assert found.render(USER, tools=[]) == "config <s><a>"

    (folder / "chat_template.jinja").write_text("file {{ bos_token }}")
    found = load_chat_template(version, tokenizer=str(folder))
    assert found and found.render(USER) == "file <s>"

    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("file's tools {{ tools | length }}")
    found = load_chat_template(version, tokenizer="tokens")
    assert found and found.render(USER) == "file <s>"
    assert found.render(USER, tools=[{}, {}]) == "file's tools 2"

    (version / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own", "bos_token": "<b>"}))
    found = load_chat_template(version, tokenizer="tokens")
    assert found and found.render(USER) == "own"

    (tmp_path / "model" / "given.jinja").write_text("given {{ bos_token }}")
    found = load_chat_template(version, tokenizer="tokens", chat_template="given.jinja")
    assert found and found.render(USER) == "given <b>"
    with pytest.raises(InvalidArgumentError, match=r"parameter chat_template: none\.jinja does not exist"):
        load_chat_template(version, chat_template="none.jinja")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ('{"chat_template": 1}', "neither a string nor a list"),
        ('{"chat_template": [{"name": "rag", "template": ""}]}', "no template has the name 'default'"),
    ],
)
def test_malformed_configs(tmp_path: Path, config: str, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(InvalidArgumentError, match=text):
        load_chat_template(tmp_path)


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnavailableError, match=r"pip install 'conch\[llm\]'"):
        ChatTemplate({"default": QWEN.template})
