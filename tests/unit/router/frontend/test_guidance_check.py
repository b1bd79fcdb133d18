"""Guidance is checked before a request waits for a worker, and off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.router_harness import DEMO

from kvrelay.config.model_sections import ModelConfig
from kvrelay.engine.sampling.grammar_trial import GrammarTrial
from kvrelay.errors import InvalidArgument, Unavailable
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types.requests import Guidance
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.frontend import guidance_check
from router.frontend.guidance_check import GuidanceCheck
from router.frontend.model_card import ModelCard
from router.frontend.validation import check_request

CARD = ModelCard.load(DEMO, ModelConfig())


@pytest.fixture
async def check() -> AsyncIterator[GuidanceCheck]:
    made = GuidanceCheck(CARD)
    yield made
    await made.close()


async def test_what_cannot_be_followed_is_refused_with_the_reason(check: GuidanceCheck) -> None:
    await check.check(Guidance("json_schema", '{"type": "object"}'), ANONYMOUS, "")
    for guidance, reason in (
        (Guidance("json_schema", '{"type": "strng"}'), '"type" at the root is unknown: strng'),
        (Guidance("json_schema", '{"not": {}}'), "not"),
        (Guidance("json_schema", '{"pattern": "a(b"}'), ": regular expression: unclosed group$"),
        (Guidance("json_schema", '{"type": '), "is not JSON: .*line 1 column 10"),
        (Guidance("json_schema", "[]"), "is not a JSON object"),
        (Guidance("regex", "a\nb("), ": regular expression: unclosed group$"),
        (Guidance("regex", r"a\b"), ": lookarounds not supported"),
        (Guidance("lark", 'start: a\na: "c" d'), ': line 2, column 4: unknown name: "d"$'),
        (
            Guidance("lark", 'start: a\na: "é" | %json {"items": {"not": {}}}'),
            ': rule a: "not" at /items cannot be followed; leave it out$',
        ),
        (Guidance("lark", 'start: "a"\n  | %json {"not": {}}'), ': rule start: "not" at the root'),
        (Guidance("lark", 'root ::= "a"'), "as in Lark, name: ..., not name ::="),
    ):
        with pytest.raises(InvalidArgument, match=reason) as caught:
            await check.check(guidance, ANONYMOUS, "")
        assert caught.value.field == "guidance"


async def test_a_grammar_that_ends_the_process_ends_neither_the_router_nor_the_next_check(
    check: GuidanceCheck,
) -> None:
    rules = [f"r{n}: r{n + 1}" for n in range(4000)]
    fatal = Guidance("lark", "\n".join(["start: r0", *rules, 'r4000: "a"']))
    with pytest.raises(InvalidArgument, match="compiling it ends the process"):
        await check.check(fatal, ANONYMOUS, "")
    await check.check(Guidance("regex", "a"), ANONYMOUS, "")


async def test_who_has_another_salt_does_not_see_by_the_time_that_a_grammar_is_known(
    check: GuidanceCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Guidance] = []
    monkeypatch.setattr(GrammarTrial, "check", lambda _, guidance: tried.append(guidance))
    asked = Guidance("regex", "a")
    # The last would be the second, if salt and source were only joined.
    for salt, guidance in (
        *(("", asked), ("x", asked), ("y", asked), ("x", asked)),
        ("x regex", Guidance("a", "b")),
        ("x", Guidance("regex", "a b")),
    ):
        await check.check(guidance, ANONYMOUS, salt)
    assert len(tried) == 5


def held_trial(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], threading.Event]:
    """What was tried out, and what lets the trials go on. The guidance "bad" is not accepted."""
    asked: list[str] = []
    go_on = threading.Event()

    def slow(trial: GrammarTrial, guidance: Guidance) -> None:
        asked.append(guidance.source)
        assert go_on.wait(60)
        if guidance.source == "bad":
            raise InvalidArgument("no", field="guidance")

    monkeypatch.setattr(GrammarTrial, "check", slow)
    return asked, go_on


async def test_a_check_is_done_once_and_blocks_no_loop(
    check: GuidanceCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = held_trial(monkeypatch)
    first = asyncio.create_task(check.check(Guidance("regex", "good"), ANONYMOUS, ""))
    await asyncio.sleep(0)
    assert not first.done()
    go_on.set()
    await first
    for _ in range(2):
        await check.check(Guidance("regex", "good"), ANONYMOUS, "")
        with pytest.raises(InvalidArgument, match="no"):
            await check.check(Guidance("regex", "bad"), ANONYMOUS, "")
    assert asked == ["good", "bad"]
    monkeypatch.setattr(guidance_check, "MAX_KNOWN", 1)
    await check.check(Guidance("lark", "good"), ANONYMOUS, "")
    assert len(check._known) == 1


async def test_a_burst_of_first_requests_is_tried_out_once(
    check: GuidanceCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = held_trial(monkeypatch)
    requests = [
        asyncio.create_task(check.check(Guidance("regex", "bad"), Tenant(str(n % 3)), ""))
        for n in range(20)
    ]
    await asyncio.sleep(0)
    requests[0].cancel()  # whoever asked first may leave
    go_on.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [str(one) for one in results[1:]] == ["no"] * 19
    assert asked == ["bad"]


async def test_tenants_take_turns(check: GuidanceCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    go_on = threading.Event()

    def slow(trial: GrammarTrial, guidance: Guidance) -> None:
        assert go_on.wait(60)
        asked.append(guidance.source)

    monkeypatch.setattr(GrammarTrial, "check", slow)
    loud, quiet = Tenant("loud"), Tenant("quiet")
    tasks = [
        asyncio.create_task(check.check(Guidance("regex", f"loud{n}" * 100), loud, ""))
        for n in range(5)
    ]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(check.check(Guidance("regex", "quiet"), quiet, "")))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*tasks)
    assert asked.index("quiet") <= 1


async def test_a_model_without_files_and_a_closed_check_refuse() -> None:
    check = GuidanceCheck(replace(CARD, folder=""))
    with pytest.raises(InvalidArgument, match="cannot follow guidance"):
        await check.check(Guidance("regex", "a"), ANONYMOUS, "")
    await check.close()
    with pytest.raises(Unavailable, match="shuts down"):
        check._trial.check(Guidance("regex", "a"))


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"guidance": Guidance("regex", "a" * 65537)}, "guidance", "65537 bytes; allowed are 1 to"),
        ({"guidance": Guidance("regex", "")}, "guidance", "empty"),
        ({"guidance": Guidance("regex", "\ud800")}, "guidance", "surrogate"),
        ({"guidance": Guidance("regex", "a"), "ignore_eos": True}, "ignore_eos", "leave out"),
        ({"guidance": Guidance("regex", "a"), "min_tokens": 2}, "min_tokens", "leave out"),
    ],
)
def test_fields_that_contradict_guidance_are_named(
    options: dict[str, object], field: str, reason: str
) -> None:
    request = GenerateRequest(prompt="hello", sampling=SamplingOptions(**options))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=reason) as caught:
        check_request(request, CARD)
    assert caught.value.field == field
