"""Models with chat templates of their own, and what routers are asked and answer with them."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.router_harness import DEMO, RouterHarness

from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.worker_messages import Prefill, RunLocal

TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Write <tool_call>{"name": "...", "arguments": {...}}</tool_call> to call one.{% endif %}
{%- if style %}<style>{{ style }}</style>{% endif %}
{%- if reasoning_effort %}<effort>{{ reasoning_effort }}</effort>{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.content is not none %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}<assistant>"""
THINKING = """\
{%- for message in messages %}<{{ message.role }}>
{%- if message.reasoning_content %}<thought>{{ message.reasoning_content }}</thought>{% endif %}
{{- message.content }}{% endfor %}<assistant>
{%- if enable_thinking %}<think>
{% endif %}{# </think> ends the thinking #}"""
TOKENIZER = Tokenizer.load(DEMO)


def demo_with(template: str, parent: Path) -> str:
    """A folder with the demo model and this chat template."""
    folder = parent / "demo"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def says(router: RouterHarness, text: str) -> None:
    router.say(TOKENIZER.encode(text, add_special_tokens=False))


def prompts(router: RouterHarness) -> list[str]:
    """The texts of the prompts that workers got."""
    return [
        TOKENIZER.decode(command.spec.token_ids[: command.spec.prompt_len])
        for server in router.workers.values()
        for command in server.worker.commands
        if isinstance(command, Prefill | RunLocal)
    ]
