"""Chat templates in the styles of model families, with conversations and the prompts that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather <now> in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WEATHER_JSON = (
    '{"type": "function", "function": {"name": "weather", "description": "Weather <now> in a city", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}'
)


@dataclass(frozen=True, kw_only=True)
class TemplateCase:
    """A template, what it is rendered with, and the prompt."""

    name: str
    template: str
    prompt: str
    messages: list[dict[str, Any]]
    special_tokens: dict[str, str] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi & bye?"},
    {"role": "assistant", "content": "Both."},
    {"role": "user", "content": "Grüße"},
]

CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
]

CHATML = TemplateCase(
    name="chatml",
    template="""\
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    messages=_TALK,
    prompt=(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi & bye?<|im_end|>\n"
        "<|im_start|>assistant\nBoth.<|im_end|>\n<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n"
    ),
)

LLAMA3 = TemplateCase(
    name="llama3",
    template="""\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ('system', 'user', 'assistant') %}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' }}
    {%- generation %}
        {{- message['content'] | trim }}
    {%- endgeneration %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    messages=[*_TALK[:1], {"role": "ignored", "content": "x"}, *_TALK[1:2]],
    special_tokens={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    prompt=(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi & bye?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
)

MISTRAL = TemplateCase(
    name="mistral",
    template="""\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.first %}
            {{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ message.content ~ '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
            {{- ', ' if not loop.last else ']' ~ eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' ~ message.content | trim ~ eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ (message.content | tojson) ~ ', "call_id": "' }}
        {{- message.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
{%- endfor %}
""",
    messages=CALLED,
    special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    tools=[WEATHER],
    prompt=(
        f"<s>[AVAILABLE_TOOLS] [{WEATHER_JSON}][/AVAILABLE_TOOLS][INST] Weather in Rome?[/INST][TOOL_CALLS] "
        '[{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]</s>'
        '[TOOL_RESULTS] {"content": "sunny", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    ),
)

HERMES = TemplateCase(
    name="hermes",
    template="""\
{%- macro call_text(call) %}
    {{- '\\n<tool_call>\\n{"name": ' ~ (call.name | tojson) }}
    {{- ', "arguments": ' ~ (call.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(tools=0) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- set ns.tools = ns.tools + 1 %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role }}
        {%- if message.content %}
            {{- '\\n' ~ message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- call_text(call.function) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    messages=CALLED,
    tools=[WEATHER],
    prompt=(
        f"<|im_start|>system\nTools:\n<tools>\n{WEATHER_JSON}\n</tools><|im_end|>\n"
        "<|im_start|>user\nWeather in Rome?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ),
)

QWEN = TemplateCase(
    name="qwen",
    template="""\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    messages=[
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
        {"role": "user", "content": "sure?"},
    ],
    kwargs={"enable_thinking": False},
    prompt=(
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
)

GEMMA = TemplateCase(
    name="gemma",
    template="""\
{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) }}
    {%- for part in message['content'] -%}
        {%- if part['type'] == 'image' -%}
            {{ '<start_of_image>' }}
        {%- elif part['type'] == 'text' -%}
            {{ '\\n' ~ part['text'] | trim }}
        {%- endif -%}
    {%- endfor -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
""",
    messages=[
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
    ],
    special_tokens={"bos_token": "<bos>"},
    add_generation_prompt=False,
    prompt=("<bos><start_of_turn>user\nOne\ntwo<end_of_turn>\n<start_of_turn>model\nthree<end_of_turn>\n"),
)

CASES = (CHATML, LLAMA3, MISTRAL, HERMES, QWEN, GEMMA)
