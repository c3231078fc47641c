"""Chat templates as `conch check` sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.chat_templates import HERMES, QWEN

from conch_llm.template_check import check_templates


@pytest.mark.parametrize(
    ("template", "parameters", "severity", "said"),
    [
        (HERMES.template, {}, "note", "tool calls are read as hermes, by the chat template"),
        ("{{ tools }}", {}, "note", 'in no known way: without the parameter CONCH_TOOL'),
        (HERMES.template, {"CONCH_TOOL_PARSER": "llama3"}, "", ""),
        (QWEN.template, {}, "", ""),
        ("{% if %}", {}, "warning", "no chat can be answered: chat template 'default', line 1"),
        ("", {"chat_template": "absent.jinja"}, "warning", "absent.jinja does not exist"),
        ("", {}, "", ""),
    ],
)  # fmt: skip
def test_findings(
    tmp_path: Path, template: str, parameters: dict[str, str], severity: str, said: str
) -> None:
    version = tmp_path / "1"
    version.mkdir()
    if template:
        (version / "chat_template.jinja").write_text(template)
    config = {
        "backend": "python",
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    found = list(check_templates(config, version, None))
    assert [each.severity for each in found] == ([severity] if severity else [])
    assert all(said in each.message for each in found)
    assert not list(check_templates({**config, "backend": "vllm"}, version, None))
