"""The whole router over real gRPC, against fake workers that speak the real protocol."""

from __future__ import annotations

from fake_worker import answer
from router_harness import inference_stub, running_router

from kvrelay.wire.inference import (
    GenerateRequest,
    GenerateResponse,
    InferenceServiceStub,
    SamplingOptions,
    request_to_proto,
    response_from_proto,
)

PROMPT = tuple(range(10, 50))


def ask(request_id: str = "", max_tokens: int = 8, **more: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, token_ids=PROMPT, sampling=SamplingOptions(max_tokens=max_tokens, seed=7, **more)
    )


async def collect(stub: InferenceServiceStub, request: GenerateRequest) -> list[GenerateResponse]:
    return [response_from_proto(one) async for one in stub.Generate(request_to_proto(request))]


def tokens_of(responses: list[GenerateResponse]) -> list[int]:
    """The answer's tokens; checks that their numbers follow each other."""
    tokens: list[int] = []
    for one in responses:
        assert one.index == len(tokens)
        tokens += one.token_ids
    return tokens


async def test_disaggregated_answer_with_its_account() -> None:
    async with running_router() as router, inference_stub(router.grpc) as stub:
        responses = await collect(stub, ask())
    assert tokens_of(responses) == answer(PROMPT, 7, 8)
    last = responses[-1]
    assert (last.finish_reason, last.path) == ("length", "disaggregated")
    assert last.ledger is not None
    assert last.ledger.handoff is not None
    assert sum(seconds for _, seconds in last.ledger.phases) == last.ledger.ttft_seconds > 0
