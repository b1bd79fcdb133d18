"""The formats in which models write tool calls, and how to tell a model's format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from router.frontend.answer_parsers import (
    bare_json,
    deepseek,
    harmony,
    hermes,
    mistral,
    qwen3_coder,
)
from router.frontend.answer_parsers.parser import AnswerParser
from router.frontend.answer_parsers.tools import Tools


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a call is written in a format whose calls are JSON objects."""

    # Key of the arguments.
    arguments: str
    # Before and after each call.
    begin: str = ""
    end: str = ""
    # Between two calls.
    between: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls."""

    name: str
    # Texts of tokens that may be special in the tokenizer. The parser must see them.
    markers: tuple[str, ...]
    # Returns a parser for one answer to a request with these tools.
    open: Callable[[Tools], AnswerParser]
    # For grammars of answers that may be calls; None if the format has no simple one.
    syntax: CallSyntax | None = None


_FORMATS = (
    ToolFormat(
        "hermes", hermes.MARKERS, hermes.HermesParser, CallSyntax("arguments", *hermes.MARKERS)
    ),
    ToolFormat("qwen3_coder", qwen3_coder.MARKERS, qwen3_coder.Qwen3CoderParser),
    ToolFormat(
        "llama3_json",
        (bare_json.PYTHON_TAG,),
        bare_json.BareJsonParser,
        CallSyntax("parameters", between=";"),
    ),
    ToolFormat("mistral", mistral.MARKERS, mistral.MistralParser),
    ToolFormat("deepseek_v3", deepseek.MARKERS, deepseek.DeepSeekParser),
    ToolFormat("deepseek_v31", deepseek.MARKERS, deepseek.DeepSeekParser),
    ToolFormat("harmony", harmony.MARKERS, harmony.HarmonyParser),
    ToolFormat("json", (), bare_json.BareJsonParser, CallSyntax("arguments", between=";")),
)
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in _FORMATS}

# The format of a template is the first one whose texts are all in the template.
_TEXTS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", '"name"', '"arguments"')),
    ("llama3_json", ("<|python_tag|>", '"parameters"')),
    ("llama3_json", ('"name": function name', '"parameters": dictionary')),
)
_TOOLS = re.compile(r"\btools\b")
# A marker of calls, in a format that has no parser.
_CALL_MARKER = re.compile(r"""[<\[][^<>\[\]\s'"]{0,40}(?:call|CALL|ACTION)|functools""")


def tool_format_of(chat_template: str) -> ToolFormat | None:
    """Returns the format of a model by the Jinja text of its chat template. Returns None if the
    template does not read `tools`, or if no parser has its format.

    The format is `json` if the template has the keys of a call and no marker of calls.
    """
    # The template may hold quotes in quotes.
    template = chat_template.replace("\\", "")
    if not _TOOLS.search(template):
        return None
    for name, texts in _TEXTS:
        if all(text in template for text in texts):
            return TOOL_FORMATS[name]
    has_keys = '"name"' in template and ('"arguments"' in template or '"parameters"' in template)
    return TOOL_FORMATS["json"] if has_keys and not _CALL_MARKER.search(template) else None
