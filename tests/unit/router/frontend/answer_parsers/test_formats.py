"""Telling a model's format by its chat template. The templates are excerpts of real ones."""

from __future__ import annotations

import pytest

from router.frontend.answer_parsers.formats import TOOL_FORMATS, tool_format_of

TOOLS = "{%- if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATES = {
    "qwen 3": ("hermes", r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}"),
    "hermes 3": ("hermes", """'<tool_call>\n{"name": "' + call.name + '", "arguments": '"""),
    "qwen3-coder": ("qwen3_coder", "'<tool_call>\n<function=' + name + '>' '<parameter=' + key"),
    "llama 3.1": ("llama3_json", """'{"name": "' + f + '", "parameters": ' "<|python_tag|>" """),
    "llama 3.2": (
        "llama3_json",
        '{"name": function name, "parameters": dictionary of argument name and its value}',
    ),
    "mistral": ("mistral", "[AVAILABLE_TOOLS] [TOOL_CALLS] ["),
    "deepseek r1": ("deepseek_v3", r"<｜tool▁call▁begin｜>' + type + '\n' + '```json' + '\n'"),
    "deepseek v3.1": ("deepseek_v31", "<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>'"),
    "gpt-oss": ("harmony", "<|start|>assistant<|channel|>final<|message|>"),
    "plain": ("json", r"Answer with {\"name\": <function-name>, \"arguments\": <object>}."),
    "glm 4.5": (None, "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>"),
    "kimi k2": (None, "<|tool_calls_section_begin|>"),
    "phi-4-mini": (None, '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>'),
    "nemotron nano": (None, '<TOOLCALL>[{{"name": "f", "arguments": "x"}}]</TOOLCALL>'),
    "unknown": (None, "{{ messages }}"),
}


@pytest.mark.parametrize(("name", "text"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_template_tells_the_format(name: str | None, text: str) -> None:
    assert tool_format_of(TOOLS + text) == (TOOL_FORMATS[name] if name else None)


@pytest.mark.parametrize(("name", "text"), TEMPLATES.values(), ids=TEMPLATES)
def test_templates_that_read_no_tools_have_no_format(name: str | None, text: str) -> None:
    assert tool_format_of("{{ message.tool_calls }}" + text.replace("AVAILABLE_TOOLS", "")) is None


def test_formats_have_their_names() -> None:
    assert set(TOOL_FORMATS) == {
        *("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31"),
        *("harmony", "json"),
    }
    assert all(name == tool_format.name for name, tool_format in TOOL_FORMATS.items())
