"""Faults around a whole router, over real gRPC and fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.fake_worker import Running, answer
from support.router_harness import (
    DEMO,
    RouterHarness,
    cluster_config,
    inference_stub,
    router_before,
    running_router,
)
from support.tcp_proxy import proxy_to

from kvrelay.errors import FailedPrecondition, Internal
from kvrelay.wire.inference import (
    GenerateRequest,
    InferenceServiceStub,
    SamplingOptions,
    request_to_proto,
    response_from_proto,
)
from kvrelay.wire.status import error_from_rpc
from kvrelay.worker_messages import RunLocal
from router import served_model
from router.sibling_processes import Place

SHORT = (11, 12, 13)


def ask(
    request_id: str = "", max_tokens: int = 8, prompt: tuple[int, ...] = SHORT
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, token_ids=prompt, sampling=SamplingOptions(max_tokens, seed=7)
    )


async def tokens(stub: InferenceServiceStub, request: GenerateRequest) -> list[int]:
    """The answer's, in order and each once. Raises the typed error."""
    received: list[int] = []
    try:
        async for message in stub.Generate(request_to_proto(request)):
            response = response_from_proto(message)
            assert response.index == len(received)
            received += response.token_ids
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return received


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


async def dies_of(router: RouterHarness, request_id: str, after: int) -> list[str]:
    """Kills each worker that runs the request when the attempt has given so many tokens; a new one
    takes its place.
    """

    def poisonous(one: Running) -> bool:
        return (
            one.spec.request_id == request_id
            and len(one.token_ids) - len(one.spec.token_ids) >= after
        )

    killed: list[str] = []
    for server in router.workers.values():
        server.poisonous = poisonous
    with suppress(asyncio.CancelledError):
        while len(killed) < 9:
            await asyncio.sleep(0.002)
            for name in [
                name for name, server in router.workers.items() if not server.may_step.is_set()
            ]:
                await router.kill(name)
                killed.append(name)
                successor = await router.add(name, "decode", 1 + len(killed))
                successor.poisonous, successor.pace_s = poisonous, 0.02
    return killed


@pytest.mark.parametrize(("after", "workers"), [(0, 2), (5, 3)])
async def test_a_poisonous_request_is_stopped_and_those_beside_it_are_unharmed(
    after: int, workers: int
) -> None:
    async with running_router(prefill=0, decode=2) as router, inference_stub(router.grpc) as stub:
        for server in router.workers.values():
            server.pace_s = 0.02
        killer = asyncio.create_task(dies_of(router, "poison", after))
        others = [
            asyncio.create_task(tokens(stub, ask(f"r{one}", 60, (*SHORT, one))))
            for one in range(20, 26)
        ]
        with pytest.raises(Internal, match=rf"{workers} workers crashed"):
            await tokens(stub, ask("poison", 60, (99, 98)))
        assert await asyncio.gather(*others) == [
            answer((*SHORT, one), 7, 60) for one in range(20, 26)
        ]
        with pytest.raises(FailedPrecondition, match="quarantine"):
            await tokens(stub, ask("again", 60, (99, 98)))
        killer.cancel()
        assert len(await killer) == workers


async def test_a_poisonous_request_costs_the_processes_of_a_router_no_more_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "LEARN_S", 0.02)
    first, second = (Place(tmp_path, number, 2) for number in range(2))
    config = cluster_config(prefill=0, decode=2)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": DEMO})})
    async with (
        running_router(prefill=0, decode=2, place=first) as router,
        router_before(config, router.registry, second) as other,
        inference_stub(router.grpc) as stub,
        inference_stub(other["grpc"]) as elsewhere,
    ):
        killer = asyncio.create_task(dies_of(router, "poison", 0))
        with pytest.raises(Internal, match="2 workers crashed"):
            await tokens(stub, ask("poison", 60, (99, 98)))
        # Another of the same tenant tells when the other process has learnt it.

        async def again() -> None:
            while True:
                await tokens(elsewhere, ask("again", 60, (99, 98)))

        with pytest.raises(FailedPrecondition, match="quarantine"):
            await asyncio.wait_for(again(), 20)
        assert await tokens(elsewhere, ask("else", 8)) == answer(SHORT, 7, 8)
        killer.cancel()
        assert len(await killer) == 2


async def test_a_worker_that_hears_and_is_not_heard_is_left_and_found_again() -> None:
    """A partition in one direction: its pings and tokens do not come through."""
    async with running_router(prefill=0, decode=1) as router, inference_stub(router.grpc) as stub:
        cut = await router.add("cut", "decode")
        router.registry.entries.pop("cut")
        async with proxy_to(cut.worker.info.address) as proxy:
            other = router.workers["decode-0"]
            other.worker.refuse = "full"
            router.registry.entries["cut"] = replace(cut.worker.info, address=proxy.address)
            cut.pace_s = 0.02
            running = asyncio.create_task(tokens(stub, ask("moved", 100)))
            await until(
                lambda: any(len(one.token_ids) > 10 for one in cut.worker.sequences.values())
            )
            proxy.passes["down"].clear()
            other.worker.refuse = ""
            assert await running == answer(SHORT, 7, 100)
            assert proxy.held_back > 0
            assert any(isinstance(one, RunLocal) for one in other.worker.commands)
            proxy.heal()
            other.worker.refuse = "full"
            assert await tokens(stub, ask("next", 8)) == answer(SHORT, 7, 8), "it is found again"


async def test_a_client_that_does_not_read_costs_its_answer_and_ends_at_its_deadline() -> None:
    async with running_router(prefill=0, decode=1) as router, inference_stub(router.grpc) as stub:
        idle = stub.Generate(request_to_proto(ask("idle", 4000)), timeout=2.0)
        decode = router.workers["decode-0"].worker
        await until(lambda: bool(decode.sequences))
        beside = await asyncio.gather(*(tokens(stub, ask(f"r{one}", 50)) for one in range(5)))
        assert beside == [answer(SHORT, 7, 50)] * 5
        assert await idle.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not decode.sequences)
