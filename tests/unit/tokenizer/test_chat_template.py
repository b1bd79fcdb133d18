from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvrelay.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvRelayError,
    ModelRefused,
    NotFound,
    Unavailable,
)
from kvrelay.models import resolve_model
from kvrelay.tokenizer.chat_template import ChatTemplate
from kvrelay.types.chat import ChatMessage

Template = Callable[[str], ChatTemplate]
ENDLESS = "{% for x in range(99999) %}" * 3 + "{% endfor %}" * 3
# Endless for a user who says "loop", else an answer.
SOMETIMES_ENDLESS = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}done"


@pytest.fixture
async def template(tmp_path: Path) -> AsyncIterator[Template]:
    """template(source): a chat template from a folder of its own, closed after the test."""
    async with AsyncExitStack() as stack:

        def load(source: str) -> ChatTemplate:
            (tmp_path / "chat_template.jinja").write_text(source)
            (tmp_path / "tokenizer_config.json").write_text(
                '{"bos_token": "<s>", "eos_token": {"content": "</s>"}}'
            )
            chat = ChatTemplate.load(tmp_path)
            stack.push_async_callback(chat.aclose)
            return chat

        yield load


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


def pid_of(chat: ChatTemplate) -> int:
    assert chat._process is not None
    return chat._process.pid


def is_gone(pid: int) -> bool:
    """True for a process that has ended and was reaped; a zombie would still be there."""
    return not Path(f"/proc/{pid}").exists()


async def test_the_demo_template_renders_as_transformers() -> None:
    conversations = [
        [("user", "What is 3 plus 4?")],
        [
            ("system", " Be brief. "),
            ("user", "Hi"),
            ("assistant", "Hello!"),
            ("user", "Wie heißt du? 日本 😀\n\n\0"),
        ],
        [("user", "")],
        [("user", "{{ 7 * 7 }} {% raw %} </s><|assistant|>")],
    ]
    folder = resolve_model("demo")
    reference = AutoTokenizer.from_pretrained(folder)
    chat = ChatTemplate.load(folder)
    for messages in conversations:
        turns = [{"role": role, "content": content} for role, content in messages]
        assert await chat.render(
            [ChatMessage(*one) for one in messages]
        ) == reference.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    await chat.aclose()


async def test_special_tokens_are_known_to_the_template(template: Template) -> None:
    chat = template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}")
    assert await chat.render(user("x")) == "<s>x</s>"


async def test_the_process_is_kept_from_call_to_call(template: Template) -> None:
    chat = template("{{ messages[0].content }}")
    await chat.render(user("a"))
    pid = pid_of(chat)
    await chat.render(user("b"))
    assert pid_of(chat) == pid


async def test_concurrent_callers_get_their_own_answers(template: Template) -> None:
    chat = template("{{ messages[0].content }}")
    texts = [f"{index}" * (index + 1) for index in range(50)]
    assert await asyncio.gather(*(chat.render(user(text)) for text in texts)) == texts


async def test_a_large_conversation_passes(template: Template) -> None:
    chat = template("{{ messages[0].content }}")
    text = "ä\n" * 1_000_000
    assert await chat.render(user(text), cpu_s=60) == text


async def test_an_endless_template_is_stopped_and_the_next_call_works(template: Template) -> None:
    chat = template(SOMETIMES_ENDLESS)
    assert await chat.render(user("x")) == "done"
    pid = pid_of(chat)
    with pytest.raises(DeadlineExceeded, match=r"took longer than 0\.2 s of processor time"):
        await chat.render(user("loop"), cpu_s=0.2)
    assert is_gone(pid)
    assert await chat.render(user("x")) == "done"


async def test_who_waits_behind_an_endless_call_is_served(template: Template) -> None:
    chat = template(SOMETIMES_ENDLESS)
    asked = (("x", 60), ("loop", 1), ("x", 60))
    calls = [chat.render(user(text), cpu_s=cpu_s) for text, cpu_s in asked]
    first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(second, DeadlineExceeded)
    assert (first, third) == ("done", "done")


async def test_a_cancelled_call_leaves_no_answer_behind(template: Template) -> None:
    chat = template(
        "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    )
    await chat.render(user("x"))
    pid = pid_of(chat)
    call = asyncio.create_task(chat.render(user("loop"), cpu_s=60))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert is_gone(pid)
    assert await chat.render(user("y")) == "y"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "rejects these messages: roles must alternate",
        ),
        ("{{ messages[7].content }}", "rejects these messages: .*no element 7"),
        ("{% if %}", "rejects these messages: Expected an expression"),
        ("{{ 1 // 0 }}", "rejects these messages: .*division"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        (
            "{{ cycler.__init__.__globals__.os.system('true') }}",
            "access to attribute '__init__' .* is unsafe",
        ),
        ("{% set x = messages.append(1) %}{{ x }}", "unsafe|not safely callable"),
        ("{{ raise_exception('x' * 100000) }}", "rejects these messages: x{1000}$"),
        ("{{ 'x' * 10 ** 10 }}", "rejects these messages: MemoryError"),
    ],
)
async def test_what_a_template_raises_is_an_invalid_argument(
    template: Template, source: str, message: str
) -> None:
    chat = template(source)
    with pytest.raises(InvalidArgument, match=message) as caught:
        await chat.render(user("x"))
    assert caught.value.field == "messages"


async def test_text_without_end_is_refused(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.tokenizer.chat_template._MAX_REPLY_BYTES", 1000)
    chat = template("{{ messages[0].content }}")
    with pytest.raises(InvalidArgument, match="send shorter messages"):
        await chat.render(user("x" * 5000))
    assert await chat.render(user("x")) == "x"


async def test_a_process_that_died_between_calls_is_replaced(template: Template) -> None:
    chat = template("{{ messages[0].content }}")
    await chat.render(user("x"))
    assert chat._process is not None
    chat._process.kill()
    await chat._process.wait()
    assert await chat.render(user("y")) == "y"


async def test_a_process_without_a_core_has_time(template: Template) -> None:
    chat = template("{{ messages[0].content }}")
    await chat.render(user("x"))
    os.kill(pid_of(chat), signal.SIGSTOP)
    call = asyncio.create_task(chat.render(user("y"), cpu_s=6))
    done, _ = await asyncio.wait([call], timeout=0.5)
    assert not done
    os.kill(pid_of(chat), signal.SIGCONT)
    assert await call == "y"


async def test_a_process_that_never_gets_a_core_is_replaced(template: Template) -> None:
    chat = template("{{ messages[0].content }}")
    await chat.render(user("x"))
    os.kill(pid_of(chat), signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=r"did not end within 0\.1 s .* machine is busy"):
        await chat.render(user("x"), cpu_s=0.01)
    assert await chat.render(user("y")) == "y"


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_process_that_is_killed_in_a_call(template: Template, kills: int) -> None:
    """As it is when the machine has no memory left: nobody's messages are to blame."""
    chat = template("{{ messages[0].content }}")
    await chat.render(user("x"))
    pids = [pid_of(chat)]
    os.kill(pids[0], signal.SIGSTOP)
    call = asyncio.create_task(chat.render(user("y"), cpu_s=60))
    await asyncio.sleep(0)
    if kills == 2:
        started = chat._started

        async def stopped() -> asyncio.subprocess.Process:
            process = await started()
            os.kill(process.pid, signal.SIGKILL)
            return process

        chat._started = stopped  # type: ignore[method-assign]
    os.kill(pids[0], signal.SIGKILL)
    if kills == 1:
        assert await call == "y"
    else:
        with pytest.raises(Unavailable, match="was killed twice; the machine may have no memory"):
            await call
    assert is_gone(pids[0])


@pytest.mark.parametrize("ends", ["cancelled", "too late", "killed"])
async def test_a_start_that_fails_leaves_no_answer_behind(
    template: Template, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """At each moment of the start of the process that replaces one whose time is over."""
    chat, started = template(SOMETIMES_ENDLESS + "{{ messages[0].content }}"), asyncio.Event()
    create = asyncio.create_subprocess_exec

    async def creating(*arguments: Any, **named: Any) -> asyncio.subprocess.Process:
        process = await create(*arguments, **named)
        os.kill(process.pid, signal.SIGKILL if ends == "killed" else signal.SIGSTOP)
        asyncio.get_running_loop().call_soon(started.set)
        return process

    await chat.render(user("x"))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", creating)
    monkeypatch.setattr(
        "kvrelay.tokenizer.chat_template._START_S", 0.1 if ends == "too late" else 60.0
    )
    call = asyncio.create_task(chat.render(user("loop"), cpu_s=0.1))
    await started.wait()
    if ends == "cancelled":
        call.cancel()
    with pytest.raises(asyncio.CancelledError if ends == "cancelled" else DeadlineExceeded):
        await call
    monkeypatch.undo()
    for text in ("a", "b", "c"):
        assert await chat.render(user(text)) == f"done{text}"


async def test_an_answer_to_another_call_is_not_taken(template: Template) -> None:
    chat = template("{{ messages[0].content }}")
    await chat.render(user("x"))
    pid, process = pid_of(chat), chat._process
    assert process is not None
    assert process.stdout is not None
    process.stdout.feed_data(b'{"call": 1, "length": 1}\nx')
    assert await chat.render(user("y")) == "y"
    assert is_gone(pid)


async def test_no_messages_are_refused(template: Template) -> None:
    with pytest.raises(InvalidArgument, match="messages is empty"):
        await template("x").render([])


async def test_closing_ends_the_process_and_calls_under_way(template: Template) -> None:
    chat = template(SOMETIMES_ENDLESS)
    await chat.render(user("x"))
    pid = pid_of(chat)
    calls = [asyncio.create_task(chat.render(user("loop"), cpu_s=60)) for _ in range(2)]
    await asyncio.sleep(0)
    await chat.aclose()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]
    assert is_gone(pid)
    with pytest.raises(Unavailable, match="closed"):
        await chat.render(user("x"))
    await chat.aclose()


@pytest.mark.parametrize(
    ("renderer", "message"),
    [
        ("raise SystemExit(3)", "does not start; its error is on stderr"),
        ("print('half a li', end='')", "does not start; its error is on stderr"),
        ("import time; time.sleep(600)", r"does not start: no answer within 0\.3 s"),
    ],
)
async def test_a_process_that_does_not_start_is_unavailable(
    template: Template, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, renderer: str, message: str
) -> None:
    broken = tmp_path / "renderer.py"
    broken.write_text(renderer)
    monkeypatch.setattr("kvrelay.tokenizer.chat_template._RENDERER", broken)
    monkeypatch.setattr(
        "kvrelay.tokenizer.chat_template._START_S", 0.3 if "sleep" in renderer else 60.0
    )
    with pytest.raises(Unavailable, match=message):
        await template("x").render(user("x"))


async def test_a_missing_interpreter_is_unavailable(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(Unavailable, match=r"does not start: .*No such file"):
        await template("x").render(user("x"))


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, NotFound, "has no chat template; send a prompt"),
        ({"tokenizer_config.json": "{}"}, NotFound, "has no chat template"),
        ({"tokenizer_config.json": "{"}, ModelRefused, "not valid JSON"),
        ({"tokenizer_config.json": '{"a":' * 10**5}, ModelRefused, "not valid JSON"),
        ({"tokenizer_config.json": "[]"}, ModelRefused, "not a JSON object"),
    ],
)
def test_a_folder_without_a_template(
    tmp_path: Path, files: dict[str, str], error: type[KvRelayError], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        ChatTemplate.load(tmp_path)


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelRefused, match="is not UTF-8"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "entry",
    ["one", [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}]],
)
async def test_templates_of_the_older_place(tmp_path: Path, entry: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    chat = ChatTemplate.load(tmp_path)
    assert await chat.render(user("x")) == "one"
    await chat.aclose()


def test_the_renderer_ends_by_itself_when_its_parent_is_gone() -> None:
    """An endless template, and nobody to kill it: the alarm does, 1 s after the time limit."""
    request = {
        "template": ENDLESS,
        "variables": {},
        "messages": [{"role": 0, "content": 1, "tool_calls": []}],
        "tools": None,
        "template_kwargs": None,
        "lengths": [4, 0],
        "call": 1,
        "cpu_s": 600,
        "timeout_s": 0.1,
    }
    renderer = Path(sys.modules["kvrelay.tokenizer.chat_template"].__file__ or "").with_name(
        "chat_renderer.py"
    )
    done = subprocess.run(
        [sys.executable, "-P", str(renderer)],
        input=json.dumps(request) + "\nuser",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -14  # SIGALRM
    assert done.stdout == '{"ready": true}\n'


@pytest.mark.parametrize(
    ("found", "imported"),
    [("find_spec('transformers')", "False"), ("None", "True")],
    ids=["usual", "a version whose module needs its packages"],
)
def test_the_renderer_imports_only_what_renders(found: str, imported: str) -> None:
    code = f"""
import sys
from importlib.util import find_spec
from kvrelay.tokenizer import chat_renderer
chat_renderer.find_spec = lambda _: {found}
text, _ = chat_renderer._renderer()([[{{"content": "x"}}]], chat_template="{{{{ messages }}}}")
assert "x" in text[0]
print("transformers.utils.hub" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == (imported, 0), done.stderr


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = """
import asyncio, sys
from kvrelay.tokenizer.chat_template import ChatTemplate
from kvrelay.models import resolve_model
from kvrelay.types.chat import ChatMessage
async def main():
    asyncio.get_running_loop().slow_callback_duration = 60
    chat = ChatTemplate.load(resolve_model("demo"))
    await chat.render([ChatMessage("user", "x")])
    await chat.aclose()
asyncio.run(main(), debug=True)
sys.exit(bool({"torch", "transformers", "jinja2"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stderr) == (0, "")
