"""The tokens of a cluster on vLLM are those of one vLLM engine alone."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from faults.fleet import Fleet, running_fleet
from faults.fleet_worker import Forks
from support.vllm_reference import WAIT_S, alone

from kvrelay.client import AsyncClient, Completion
from kvrelay.errors import KvRelayError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]
ANSWER = 24
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3}


def prompts(count: int, seed: int, *lengths: int) -> list[list[int]]:
    """Of mixed lengths, each unlike the others."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 2000) for _ in range(draw.choice(lengths))] for _ in range(count)]


async def answers(
    fleet: Fleet, asked: list[list[int]], sampling: Mapping[str, Any], **options: Any
) -> list[Completion]:
    """Eight at a time. Each has its number as its seed."""
    slots = asyncio.Semaphore(8)
    async with AsyncClient(fleet.router.endpoints.grpc) as client:

        async def ask(number: int, prompt: list[int]) -> Completion:
            async with slots:
                fixed = {"max_tokens": ANSWER, "ignore_eos": True, "seed": number}
                stream = client.generate(
                    token_ids=prompt, timeout=WAIT_S, **{**fixed, **sampling, **options}
                )
                return await stream.result()

        return list(await asyncio.gather(*(ask(n, one) for n, one in enumerate(asked))))


def paths(found: list[Completion]) -> Counter[str]:
    return Counter(one.path for one in found)


async def test_greedy_tokens_are_those_of_one_engine_alone(fleet: Fleet) -> None:
    asked = prompts(64, 1, 9, 40, 64, 65, 130, 300, 511, 700)
    order = {"model": fleet.model, "prompts": asked, "max_tokens": ANSWER}
    (expected,) = await asyncio.to_thread(alone, order)
    found = await answers(fleet, asked, {"temperature": 0.0})
    assert [list(one.token_ids) for one in found] == expected
    assert paths(found)["disaggregated"] >= 30
    assert paths(found)["local"] >= 4
    for one in found:
        assert one.ledger is not None
        if one.path == "disaggregated":
            assert one.ledger.handoff is not None
            assert one.ledger.handoff.bytes, "KV was handed over"
    for worker in fleet.alive:
        await fleet.at_rest(worker)


async def test_seeded_tokens_are_equal_on_each_path(fleet: Fleet) -> None:
    """A decode worker that continues an answer computes the prompt and the first tokens itself."""
    asked = prompts(12, 2, 90, 200, 400)
    whole = await answers(fleet, asked, SAMPLED)
    greedy = await answers(fleet, asked, {"temperature": 0.0})
    assert paths(whole) == {"disaggregated": len(asked)}
    differing = sum(
        one.token_ids != other.token_ids for one, other in zip(whole, greedy, strict=True)
    )
    assert differing > len(asked) / 2, "they are drawn"
    short = [prompt[:40] for prompt in asked]
    once, again = [await answers(fleet, short, SAMPLED) for _ in range(2)]
    assert paths(once) == {"local": len(asked)}
    assert [one.token_ids for one in once] == [one.token_ids for one in again]


async def test_options_of_the_sampler_hold(fleet: Fleet) -> None:
    (prompt,) = prompts(1, 3, 150)
    (plain,) = await answers(fleet, [prompt], {"temperature": 0.0}, logprobs=2)
    assert [one.logprob for one in plain.logprobs] == [one.top[0][1] for one in plain.logprobs]
    first = plain.token_ids[0]
    (biased,) = await answers(fleet, [prompt], {"temperature": 0.0}, logit_bias={first: -100.0})
    assert first not in biased.token_ids
    stop = plain.token_ids[5]
    (stopped,) = await answers(fleet, [prompt], {"temperature": 0.0}, stop_token_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]


async def test_an_answer_follows_its_grammar(fleet: Fleet) -> None:
    (prompt,) = prompts(1, 5, 120)
    grammar = {"guidance": {"regex": "(cat|dog){3}"}, "ignore_eos": False}
    (found,) = await answers(fleet, [prompt], SAMPLED | grammar)
    assert re.fullmatch("(cat|dog){3}", found.text), found.text
    assert found.finish_reason == "stop"


async def test_a_feature_that_vllm_workers_lack_is_refused(fleet: Fleet) -> None:
    (prompt,) = prompts(1, 6, 20)
    with pytest.raises(KvRelayError, match="prompt_logprobs"):
        await answers(fleet, [prompt], {}, prompt_logprobs=1)


async def test_a_cached_prefix_is_not_computed_again(forks: Forks) -> None:
    """By neither worker, and not for another tenant's salt."""
    kv = {"memory": "64MiB", "prefix_cache": True}
    one = {"replicas": 1}
    async with running_fleet(forks, kv=kv, prefill=one, decode=one) as fleet:
        (prompt,) = prompts(1, 4, 320)
        greedy = {"temperature": 0.0}
        (first,) = await answers(fleet, [prompt], greedy)
        (second,) = await answers(fleet, [prompt], greedy)
        (other,) = await answers(fleet, [prompt], greedy, cache_salt="other")
        assert first.token_ids == second.token_ids == other.token_ids
        cached = [one.usage.cached_tokens for one in (first, second, other) if one.usage]
        assert cached[0] == cached[2] == 0
        assert cached[1] >= 256
        for worker in fleet.alive:
            await fleet.at_rest(worker)


async def test_the_router_knows_what_vllm_has_cached_and_evicted(forks: Forks) -> None:
    """Told by vLLM's KV events: predicted and real cache hits are equal, also after evictions."""
    kv = {"memory": "50MiB", "prefix_cache": True}
    one = {"replicas": 1}
    draw = random.Random(8)
    prefixes = prompts(30, 8, 512)
    corrected, hits, misses = [], 0, 0
    async with running_fleet(forks, kv=kv, prefill={"replicas": 2}, decode=one) as fleet:
        for number in range(80):
            prompt = draw.choice(prefixes) + prompts(1, 100 + number, 70)[0]
            (found,) = await answers(fleet, [prompt], {"temperature": 0.0}, max_tokens=1)
            assert found.usage is not None
            hits += found.usage.cached_tokens > 0
            misses += found.usage.cached_tokens == 0
            corrected += [found.why] if "prompt tokens were found cached" in found.why else []
            # A worker tells its changes within 0.1 s.
            await asyncio.sleep(0.3)
    assert hits > 10
    assert misses > len(prefixes), "blocks were evicted"
    # A busy machine may delay some.
    assert len(corrected) <= 6, corrected
