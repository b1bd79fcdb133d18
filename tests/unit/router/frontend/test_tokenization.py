from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.router_harness import DEMO

import router.frontend.tokenization
from kvrelay.errors import InvalidArgument
from kvrelay.tenants import Tenant
from kvrelay.tokenizer.chat_template import ChatTemplate
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.chat import WITHOUT_TOOLS, ChatMessage, ChatOptions
from kvrelay.types.requests import SamplingParams
from router.frontend.tokenization import INLINE, Text


async def test_long_text_is_converted_as_short_text_is() -> None:
    text = Text.load(DEMO)
    words = "the little dog " * INLINE
    tokens = await text.encode(words)
    assert len(tokens) > INLINE
    assert await text.decode(tokens) == words


async def test_model_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    text = Text.load(str(tmp_path))
    stream = text.open_stream(SamplingParams(), (1, 2))
    assert (stream.push(5), stream.stopped, stream.finish()) == ("", False, "")
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        await text.encode("hello")
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        await text.decode([1])
    with pytest.raises(InvalidArgument, match="stop strings"):
        text.open_stream(SamplingParams(stop=("end",)), ())
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        await text.encode_chat([ChatMessage("user", "hello")])
    await text.close()


async def test_stream_knows_the_prompt_and_the_stop_strings() -> None:
    text = Text.load(DEMO)
    prompt = await text.encode("Once upon a time")
    answer = await text.encode(" there was a dog", add_special_tokens=False)
    stream = text.open_stream(SamplingParams(stop=("was",)), prompt)
    pieces = [stream.push(one) for one in answer]
    assert ("".join(pieces) + stream.finish()).strip() == "there"
    assert stream.stopped


async def test_cancelled_chats_end_no_process_that_others_use() -> None:
    text = Text.load(DEMO)
    began: dict[ChatTemplate, object] = {}
    try:
        for wait in range(12):
            chats = [
                asyncio.create_task(
                    text.encode_chat([ChatMessage("user", "hello " * 10**5)], Tenant("busy"))
                )
                for _ in range(4)
            ]
            # They wait for a turn, write, or read.
            for _ in range(wait**2):
                await asyncio.sleep(0)
            for one in chats:
                one.cancel()
            await text.encode_chat([ChatMessage("user", "hello")], Tenant("guest"))
            await asyncio.gather(*chats, return_exceptions=True)
            for one in text._renderers:
                if one._process is not None:
                    assert began.setdefault(one, one._process) is one._process
                    assert one._process.returncode is None
        assert began
    finally:
        await text.close()


async def test_after_the_warm_up_a_chat_starts_no_process() -> None:
    text = Text.load(DEMO)
    try:
        await text.warm_up()
        began = [one._process for one in text._renderers]
        assert len(began) - began.count(None) == 1
        await text.encode_chat([ChatMessage("user", "hello")])
        assert [one._process for one in text._renderers] == began
    finally:
        await text.close()


async def test_a_template_that_refuses_a_greeting_or_does_not_start_ends_no_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strange = Text(None, [ChatTemplate("{{ raise_exception('not this') }}", {})])
    try:
        await strange.warm_up()
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        await Text.load(DEMO).warm_up()
    finally:
        await strange.close()
    await Text(None, []).warm_up()


class Renderer(ChatTemplate):
    """Renders conversations that begin with "slow" when it is told to."""

    def __init__(self, go_on: asyncio.Event) -> None:
        super().__init__("", {})
        self._go_on = go_on

    async def render(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions = WITHOUT_TOOLS,
        timeout_s: float = 2.0,
    ) -> str:
        if messages[0].content.startswith("slow"):
            await self._go_on.wait()
        return messages[0].content


async def test_a_tenant_with_slow_conversations_leaves_a_renderer_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.frontend.tokenization, "SLOW_S", 30.0)
    go_on, now = asyncio.Event(), asyncio.get_running_loop().time()
    text = Text(Tokenizer.load(DEMO), [Renderer(go_on), Renderer(go_on)])
    text._took(Tenant("hostile"), now - 31.0, now)

    async def encode(tenant: str, content: str) -> tuple[int, ...]:
        return await text.encode_chat([ChatMessage("user", content)], Tenant(tenant))

    async with asyncio.timeout(60):
        more = [asyncio.create_task(encode("hostile", "slow")) for _ in range(4)]
        for number in range(4):
            assert await encode("victim", f"{number}")
        assert not any(one.done() for one in more)
        go_on.set()
        await asyncio.gather(*more)
    await text.close()
