"""The whole router over real gRPC, against fake workers that speak the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_worker import FakeWorkerServer, answer, next_token
from support.router_harness import DEMO, RouterHarness, inference_stub, running_router

from kvrelay.errors import (
    Code,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvRelayError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import Slo
from kvrelay.wire.inference import (
    GenerateRequest,
    GenerateResponse,
    InferenceServiceStub,
    SamplingOptions,
    models_from_proto,
    pb,
    request_to_proto,
    response_from_proto,
)
from kvrelay.wire.status import error_from_rpc
from kvrelay.worker_messages import Prefill, Reserve, RunLocal

PROMPT = tuple(range(10, 50))
SHORT = (11, 12, 13)


def ask(
    request_id: str = "", max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT, **more: Any
) -> GenerateRequest:
    sampling = replace(SamplingOptions(max_tokens=max_tokens, seed=7), **more)
    return GenerateRequest(request_id=request_id, token_ids=prompt, sampling=sampling)


async def collect(
    stub: InferenceServiceStub, request: GenerateRequest, timeout_s: float | None = None
) -> list[GenerateResponse]:
    """Raises the typed error."""
    try:
        return [
            response_from_proto(one)
            async for one in stub.Generate(request_to_proto(request), timeout=timeout_s)
        ]
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None


def tokens_of(responses: list[GenerateResponse], first: int = 0) -> list[int]:
    """The answer's tokens; checks that their numbers follow each other."""
    tokens: list[int] = []
    for one in responses:
        assert one.index == first + len(tokens)
        tokens += one.token_ids
    return tokens


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


def idle(router: RouterHarness) -> bool:
    return not any(one.worker.sequences or one.worker.prompts for one in router.workers.values())


@pytest.fixture
async def router() -> AsyncIterator[RouterHarness]:
    """One prefill and one decode worker."""
    async with running_router() as running:
        yield running


@pytest.fixture
async def stub(router: RouterHarness) -> AsyncIterator[InferenceServiceStub]:
    async with inference_stub(router.grpc) as connected:
        yield connected


# Answers


@pytest.mark.parametrize("prompt", [SHORT, PROMPT])
async def test_the_smallest_slo_reaches_the_workers(prompt: tuple[int, ...]) -> None:
    """In seconds it would be 0, which workers refuse."""
    async with running_router() as router, inference_stub(router.grpc) as stub:
        request = replace(ask(prompt=prompt), slo=Slo(ttft_ms=5e-324, itl_ms=5e-324))
        assert len(tokens_of(await collect(stub, request))) == 8
        given = [
            one.spec.itl_s
            for server in router.workers.values()
            for one in server.worker.commands
            if isinstance(one, Prefill | Reserve | RunLocal)
        ]
        assert given
        assert all(one is not None and one > 0 for one in given)


async def test_disaggregated_answer_with_its_account(stub: InferenceServiceStub) -> None:
    responses = await collect(stub, ask())
    assert tokens_of(responses) == answer(PROMPT, 7, 8)
    last = responses[-1]
    assert (last.finish_reason, last.path) == ("length", "disaggregated")
    assert last.why.endswith("; prefill-0 is free first, 0 tokens queued")
    assert last.ledger is not None
    assert last.ledger.handoff is not None
    assert last.ledger.handoff.transport == "fake"
    assert [name for name, _ in last.ledger.phases] == [
        "tokenize", "queue", "reserve", "prefill_queue", "prefill", "return", "emit",
    ]  # fmt: skip
    assert sum(seconds for _, seconds in last.ledger.phases) == last.ledger.ttft_seconds > 0
    assert [(one.decode_worker, one.outcome) for one in last.ledger.attempts] == [
        ("decode-0", "finished")
    ]
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (40, 8)
    assert all(one.ledger is None and one.usage is None for one in responses[:-1])


async def test_short_prompt_takes_the_local_path(stub: InferenceServiceStub) -> None:
    responses = await collect(stub, ask(prompt=SHORT))
    assert tokens_of(responses) == answer(SHORT, 7, 8)
    assert responses[-1].path == "local"
    assert responses[-1].why == "3 uncached prompt tokens are below local_below_tokens=8"


async def test_text_in_and_out(stub: InferenceServiceStub) -> None:
    tokenizer = Tokenizer.load(DEMO)
    prompt = tuple(tokenizer.encode("Once upon a time"))
    request = GenerateRequest(
        prompt="Once upon a time", sampling=SamplingOptions(max_tokens=12, seed=7)
    )
    responses = await collect(stub, request)
    assert tokens_of(responses) == (expected := answer(prompt, 7, 12))
    assert "".join(one.text for one in responses) == tokenizer.decode(expected)


async def test_chat_goes_through_the_template(stub: InferenceServiceStub) -> None:
    request = GenerateRequest(
        messages=(ChatMessage("user", "hello"),), sampling=SamplingOptions(max_tokens=3, seed=7)
    )
    prompt = tuple(
        Tokenizer.load(DEMO).encode("<s><|user|>hello</s><|assistant|>", add_special_tokens=False)
    )
    assert tokens_of(await collect(stub, request)) == answer(prompt, 7, 3)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 7, 300])
async def test_stop_string_ends_the_answer_before_it(
    router: RouterHarness, stub: InferenceServiceStub, tokens_per_step: int
) -> None:
    router.workers["decode-0"].worker.tokens_per_step = tokens_per_step
    tokenizer = Tokenizer.load(DEMO)
    expected = answer(PROMPT, 7, 200)
    text = tokenizer.decode(expected)
    stop = text[20:25]
    responses = await collect(stub, ask(max_tokens=200, stop=(stop,)))
    assert "".join(one.text for one in responses) == text[: text.index(stop)]
    tokens = tokens_of(responses)
    assert tokens == expected[: len(tokens)]
    assert stop in tokenizer.decode(tokens)
    assert stop not in tokenizer.decode(tokens[:-1]), "no token beyond the one that completed it"
    assert responses[-1].usage is not None
    assert responses[-1].usage.completion_tokens == len(tokens)
    assert responses[-1].finish_reason == "stop"
    await until(lambda: idle(router))


async def test_single_token(router: RouterHarness, stub: InferenceServiceStub) -> None:
    responses = await collect(stub, ask(max_tokens=1))
    assert tokens_of(responses) == [next_token(PROMPT, 7)]
    await until(lambda: idle(router))


async def test_logprobs_come_with_their_tokens(stub: InferenceServiceStub) -> None:
    responses = await collect(stub, ask(logprobs=2))
    assert all(len(one.logprobs) == len(one.token_ids) for one in responses)
    assert responses[0].logprobs[0].logprob == -0.5


async def test_many_at_once(router: RouterHarness, stub: InferenceServiceStub) -> None:
    prompts = [tuple(range(10 + number, 40 + number)) for number in range(30)]
    answers = await asyncio.gather(*(collect(stub, ask(prompt=one)) for one in prompts))
    assert [tokens_of(one) for one in answers] == [answer(one, 7, 8) for one in prompts]
    await until(lambda: idle(router))


async def test_resume_goes_on_after_the_tokens_that_came(stub: InferenceServiceStub) -> None:
    expected = answer(PROMPT, 7, 8)
    responses = await collect(stub, replace(ask(), resume=tuple(expected[:3])))
    assert tokens_of(responses, first=3) == expected[3:]
    assert responses[-1].usage is not None
    assert responses[-1].usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (replace(ask(max_tokens=2), resume=(20, 21)), "length"),
        (replace(ask(), resume=(20, 2)), "stop"),  # 2 is the demo model's end of text
        (replace(ask(stop_token_ids=(21,)), resume=(20, 21)), "stop"),
    ],
)
async def test_resume_of_a_whole_answer_ends_at_once(
    router: RouterHarness, stub: InferenceServiceStub, request_: GenerateRequest, reason: str
) -> None:
    (response,) = await collect(stub, request_)
    assert (response.index, response.token_ids, response.finish_reason) == (2, (), reason)
    assert not any(one.worker.commands for one in router.workers.values())


async def test_client_that_does_not_read_gets_one_large_response(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    decode = router.workers["decode-0"]
    call = stub.Generate(request_to_proto(ask(max_tokens=600)))
    first = response_from_proto(await call.read())
    await until(lambda: bool(decode.worker.commands) and not decode.worker.sequences)
    rest = [response_from_proto(one) async for one in _rest(call)]
    assert tokens_of([first, *rest]) == answer(PROMPT, 7, 600)


async def _rest(call: grpc.aio.UnaryStreamCall) -> AsyncIterator[pb.GenerateResponse]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


# Refusals


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (replace(ask(), token_ids=()), InvalidArgument, "prompt"),
        (replace(ask(), token_ids=(5000,)), InvalidArgument, "token_ids"),
        (ask(temperature=-1.0), InvalidArgument, "temperature"),
        (ask(max_tokens=5000), InvalidArgument, "max_tokens"),
        (ask(request_id="a\r\nb"), InvalidArgument, "request_id"),
        (replace(ask(), model="other"), NotFound, "model"),
        (GenerateRequest(messages=(ChatMessage("wizard", "x"),)), InvalidArgument, "messages"),
    ],
)
async def test_bad_requests_are_refused_before_anything_is_sent(
    router: RouterHarness,
    stub: InferenceServiceStub,
    request_: GenerateRequest,
    kind: type[KvRelayError],
    field: str,
) -> None:
    with pytest.raises(kind) as caught:
        await collect(stub, request_)
    assert caught.value.field == field
    assert not any(one.worker.commands for one in router.workers.values())


async def test_message_over_the_cap(stub: InferenceServiceStub) -> None:
    with pytest.raises(ResourceExhausted):
        await collect(stub, GenerateRequest(prompt="x" * 5_000_000))


async def test_live_request_id_twice(router: RouterHarness, stub: InferenceServiceStub) -> None:
    router.workers["decode-0"].may_step.clear()
    first = asyncio.create_task(collect(stub, ask("mine", prompt=SHORT)))
    await until(lambda: bool(router.workers["decode-0"].worker.sequences))
    with pytest.raises(FailedPrecondition) as caught:
        await collect(stub, ask("mine"))
    assert caught.value.field == "request_id"
    router.workers["decode-0"].may_step.set()
    assert tokens_of(await first) == answer(SHORT, 7, 8)


async def test_list_models(stub: InferenceServiceStub) -> None:
    (model,) = models_from_proto(await stub.ListModels(pb.ListModelsRequest()))
    assert (model.id, model.max_model_len, model.architecture) == ("demo", 4096, "LlamaForCausalLM")


# Ends that the client or the clock brings


@pytest.mark.parametrize("held", ["prefill-0", "decode-0"])
async def test_cancel_frees_both_workers(
    router: RouterHarness, stub: InferenceServiceStub, held: str
) -> None:
    router.workers[held].may_step.clear()
    call = stub.Generate(request_to_proto(ask(max_tokens=500)))
    reading = asyncio.create_task(call.read())
    await until(
        lambda: bool(router.workers[held].worker.sequences or router.workers[held].worker.prompts)
    )
    call.cancel()
    await asyncio.wait({reading})
    await until(lambda: idle(router))


async def test_cancel_in_mid_stream_frees_the_decode_worker(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    call = stub.Generate(request_to_proto(ask(max_tokens=4000)))
    for _ in range(3):
        await call.read()
    call.cancel()
    await until(lambda: idle(router))
    assert router.workers["decode-0"].worker.commands[-1].__class__.__name__ == "Abort"


# With the router's own deadline: near the client's, a busy machine may lose the answer.


async def test_deadline_on_a_worker_that_hangs() -> None:
    async with (
        running_router(default_deadline_s=1.0) as router,
        inference_stub(router.grpc) as stub,
    ):
        router.workers["decode-0"].may_step.clear()
        with pytest.raises(DeadlineExceeded) as caught:
            await collect(stub, ask(prompt=SHORT))
        assert "prefilling" in caught.value.message
        await until(lambda: idle(router))


async def test_deadline_without_a_decode_worker_is_unavailable() -> None:
    async with (
        running_router(default_deadline_s=1.0) as router,
        inference_stub(router.grpc) as stub,
    ):
        await router.kill("decode-0")
        with pytest.raises(Unavailable) as caught:
            await collect(stub, ask())
    assert caught.value.message == "no decode worker is ready"
    assert caught.value.retry_after_s is not None


# Faults


@pytest.mark.parametrize("count", [1, 3, 6])
async def test_decode_worker_dies_in_mid_stream_and_the_tokens_stay_the_same(count: int) -> None:
    async with running_router(decode=2) as router, inference_stub(router.grpc) as stub:
        for name in ("decode-0", "decode-1"):
            router.workers[name].steps_left = count
        responses = asyncio.create_task(collect(stub, ask()))
        await until(lambda: any(one.steps_left == 0 for one in router.workers.values()))
        (victim,) = [name for name, one in router.workers.items() if one.worker.sequences]
        survivor = router.workers["decode-1" if victim == "decode-0" else "decode-0"]
        await router.kill(victim)
        survivor.steps_left = None
        survivor.wake()
        result = await responses
        await until(lambda: idle(router))
    assert tokens_of(result) == answer(PROMPT, 7, 8)
    ledger = result[-1].ledger
    assert ledger is not None
    assert [one.outcome for one in ledger.attempts] == [f"{victim} was lost", "finished"]


async def test_prefill_worker_dies_while_it_computes(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    router.workers["prefill-0"].may_step.clear()
    responses = asyncio.create_task(collect(stub, ask()))
    await until(lambda: bool(router.workers["prefill-0"].worker.prompts))
    await router.kill("prefill-0")
    result = await responses
    assert tokens_of(result) == answer(PROMPT, 7, 8)
    assert (result[-1].path, result[-1].why) == ("local", "no prefill worker is ready")
    await until(lambda: idle(router))


async def test_full_decode_worker_is_waited_for(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    decode = router.workers["decode-0"].worker
    decode.refuse = "full"
    responses = asyncio.create_task(collect(stub, ask()))
    await until(lambda: len(decode.commands) >= 2)
    decode.refuse = ""
    result = await responses
    assert tokens_of(result) == answer(PROMPT, 7, 8)
    assert result[-1].ledger is not None
    assert len(result[-1].ledger.attempts) == 1


async def test_attempts_are_bounded(router: RouterHarness, stub: InferenceServiceStub) -> None:
    router.workers["decode-0"].worker.fail = Code.DATA_LOSS
    with pytest.raises(DataLoss) as caught:
        await collect(stub, ask())
    assert caught.value.message == "decode-0: told to fail"
    assert len(router.workers["decode-0"].worker.commands) == 5
    await until(lambda: idle(router))


async def test_pair_that_cannot_hand_over_is_not_chosen_again_and_again(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    prefill = router.workers["prefill-0"].worker
    prefill.fail = Code.UNAVAILABLE
    for number in range(3):
        prompt = tuple(range(10 + number, 50 + number))
        responses = await collect(stub, ask(prompt=prompt))
        assert tokens_of(responses) == answer(prompt, 7, 8)
        assert responses[-1].path == "local"
    assert len([one for one in prefill.commands if isinstance(one, Prefill)]) == 1


async def test_full_queue_refuses_the_next() -> None:
    async with running_router(max_queue=1) as router, inference_stub(router.grpc) as stub:
        decode = router.workers["decode-0"].worker
        decode.refuse = "full"
        waiting = asyncio.create_task(collect(stub, ask()))
        await until(lambda: bool(decode.commands))
        with pytest.raises(ResourceExhausted) as caught:
            await collect(stub, ask())
        assert caught.value.retry_after_s is not None
        decode.refuse = ""
        assert tokens_of(await waiting) == answer(PROMPT, 7, 8)


async def test_registry_that_is_away_stops_nothing(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    router.registry.away = True
    for _ in range(2):
        assert tokens_of(await collect(stub, ask())) == answer(PROMPT, 7, 8)


async def test_registry_that_was_flushed_stops_nothing(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    entries = dict(router.registry.entries)
    router.registry.entries.clear()
    published = len(router.registry.published)
    # A beat later, polls have seen it empty
    await until(lambda: len(router.registry.published) > published)
    assert tokens_of(await collect(stub, ask())) == answer(PROMPT, 7, 8)
    router.registry.entries |= entries


async def test_worker_that_comes_back_is_a_new_one(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    await router.kill("decode-0")
    again: FakeWorkerServer = await router.add("decode-0", "decode", epoch=2)
    assert tokens_of(await collect(stub, ask())) == answer(PROMPT, 7, 8)
    assert again.worker.commands


async def test_answer_of_a_worker_with_another_epoch_is_not_taken(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    """The registry is behind: the process at the address is a later incarnation."""
    await router.kill("decode-0")
    again = await router.add("decode-0", "decode", epoch=3)
    router.registry.entries["decode-0"] = replace(again.worker.info, epoch=2)
    with pytest.raises((Unavailable, DeadlineExceeded)):
        await collect(stub, ask(), timeout_s=1.5)
    assert again.worker.commands == []


# The router's own end


async def test_drain_refuses_new_requests_and_lets_the_others_end(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    router.workers["decode-0"].may_step.clear()
    flying = asyncio.create_task(collect(stub, ask(prompt=SHORT)))
    await until(lambda: bool(router.workers["decode-0"].worker.sequences))
    router.stop()
    with pytest.raises(Unavailable, match="draining"):
        await collect(stub, ask())
    assert await health_of(router) == health_pb2.HealthCheckResponse.NOT_SERVING
    router.workers["decode-0"].may_step.set()
    assert tokens_of(await flying) == answer(SHORT, 7, 8)
    await asyncio.wait_for(router.task, 10)


async def test_second_signal_ends_it_at_once(
    router: RouterHarness, stub: InferenceServiceStub
) -> None:
    router.workers["decode-0"].may_step.clear()
    flying = asyncio.create_task(collect(stub, ask(prompt=SHORT)))
    await until(lambda: bool(router.workers["decode-0"].worker.sequences))
    router.stop()
    router.stop()
    with pytest.raises(Unavailable, match="resume at another"):
        await flying
    await asyncio.wait_for(router.task, 10)


async def health_of(router: RouterHarness) -> int:
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service="kvrelay.v1.InferenceService")
        status: int = (await health_pb2_grpc.HealthStub(channel).Check(request)).status
        return status


async def test_health_follows_the_decode_pool(router: RouterHarness) -> None:
    assert await health_of(router) == health_pb2.HealthCheckResponse.SERVING
    await router.kill("decode-0")
    async with asyncio.timeout(60):
        while await health_of(router) != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.02)


async def test_a_client_that_does_not_read_is_left(
    router: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.grpc.service.SLOW_READER_S", 0.2)
    narrow = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(router.grpc, narrow) as channel:
        request = request_to_proto(ask(max_tokens=3000, prompt=SHORT))
        call = InferenceServiceStub(channel).Generate(request, timeout=10_000)
        async with asyncio.timeout(60):
            await until(lambda: not idle(router))
            await until(lambda: idle(router))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not read the answer for 0.2 s" in (caught.value.details() or "")
