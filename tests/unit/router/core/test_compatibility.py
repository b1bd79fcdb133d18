"""An answer comes from one version of the model, whatever workers there are besides."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dispatched import LONG, SHORT, TARGET, attempt, placements, request, submit
from support.fake_worker import worker_info
from support.router_harness import inference_stub, running_router

from kvrelay.config.model_sections import RouterConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvrelay.protocol_version import Protocol
from kvrelay.types.workers import ModelVersion, WorkerInfo
from kvrelay.wire.inference import GenerateRequest
from kvrelay.wire.inference import pb as inference_pb
from kvrelay.worker_messages import Prefill, Refused, Reserve, Reserved, SequenceTokens, TokenBatch
from router.core.compatibility import misfit
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, End, Send
from router.core.model_versions import GONE_S
from router.core.path_policy import Assignment, Wait, assign
from router.core.request import Request
from router.core.worker_view import WorkerView
from router.frontend.validation import resumed_model

# By the bytes that protocol 0 samples they are one
OLD, NEW = ModelVersion("old", "same"), ModelVersion("new", "same")
VERSIONS = st.sampled_from([OLD, NEW, ModelVersion("", "same"), ModelVersion("", "other")])


def info(name: str, model: ModelVersion) -> WorkerInfo:
    found = replace(
        worker_info(name, "prefill" if name.startswith("p") else "decode"),
        model_id=model.full or model.sampled,
    )
    if model.full:
        return replace(found, protocol=Protocol(1), sampled_model_id=model.sampled)
    return found


def cluster(**workers: ModelVersion) -> Dispatcher:
    made = Dispatcher(
        ClusterConfig.model_validate(
            {"router": {"local_below_tokens": 8}, "kv": {"block_size": 16}}
        )
    )
    for name, model in workers.items():
        made.worker_found(info(name, model), 0.0)
    return made


def token(
    made: Dispatcher, worker_id: str, request_id: str = "a", now: float = 1.0
) -> list[Effect]:
    one = SequenceTokens(
        request_id, attempt(made, request_id), len(made._entries[request_id].life.tokens), (1,)
    )
    return made.on_event(worker_id, TokenBatch((one,)), now)


@given(
    st.lists(
        st.builds(
            WorkerView, st.uuids().map(str), st.sampled_from(["prefill", "decode"]), model=VERSIONS
        )
    ),
    st.none() | VERSIONS,
    st.sampled_from([4, 900]),
)
def test_all_workers_of_an_attempt_have_one_version(
    workers: list[WorkerView], pin: ModelVersion | None, num_tokens: int
) -> None:
    models = {one.worker_id: one.model for one in workers}
    found = assign(workers, num_tokens, frozenset(), RouterConfig(), model=pin)
    if isinstance(found, Assignment):
        chosen = [
            models[one]
            for one in (found.decode, found.prefill, found.source and found.source.worker_id)
            if one
        ]
        assert all(one.is_same(other) for one in chosen for other in chosen)
        assert all(one.is_same(found.model) for one in chosen)
        assert pin is None or all(one.is_same(pin) for one in chosen)
    else:
        assert not any(
            one.pool == "decode" and (pin is None or one.model.is_same(pin)) for one in workers
        )


def test_a_version_with_both_pools_comes_first() -> None:
    workers = [
        WorkerView("d0", "decode", model=NEW),
        WorkerView("d1", "decode", model=OLD, held_tokens=500),
    ]
    found = assign(
        [*workers, WorkerView("p0", "prefill", model=OLD)], 900, frozenset(), RouterConfig()
    )
    assert isinstance(found, Assignment)
    assert (found.path, found.decode) == ("disaggregated", "d1")
    full = [workers[0], replace(workers[1], full=True), WorkerView("p0", "prefill", model=OLD)]
    found = assign(full, 900, frozenset(), RouterConfig())
    assert isinstance(found, Assignment)
    assert (found.path, found.decode) == ("local", "d0"), "and the other one when that has no room"


def test_a_prefix_is_not_fetched_from_another_version() -> None:
    holder = WorkerView("d1", "decode", model=NEW, cached_tokens=800, block_size=16, full=True)
    workers = [
        WorkerView("d0", "decode", model=OLD),
        WorkerView("p0", "prefill", model=OLD, block_size=16),
        holder,
    ]
    found = assign(workers, 900, frozenset(), RouterConfig())
    assert isinstance(found, Assignment)
    assert (found.prefill, found.source) == ("p0", None)
    found = assign([replace(one, model=OLD) for one in workers], 900, frozenset(), RouterConfig())
    assert isinstance(found, Assignment)
    assert found.source is not None, "it is, from its own"


def test_before_its_first_token_a_request_may_go_to_any_version() -> None:
    made = cluster(d0=OLD)
    assert placements(submit(made, request("a"))) == [("a", "d0")]
    made.worker_found(info("d1", NEW), 1.0)
    assert placements(made.worker_lost("d0", 2.0, expected=True)) == [("a", "d1")]


def test_after_its_first_token_it_waits_for_its_own_while_others_go_on() -> None:
    made = cluster(d0=OLD)
    submit(made, request("a"))
    token(made, "d0")
    made.worker_found(info("d1", NEW), 1.0)
    assert placements(made.worker_lost("d0", 2.0, expected=True)) == []
    assert placements(submit(made, request("b"), 3.0)) == [("b", "d1")], "it stands in nobody's way"
    assert placements(made.worker_found(info("d2", OLD), 4.0)) == [("a", "d2")]


def test_a_draining_worker_continues_the_answers_of_a_version_that_no_ready_worker_has() -> None:
    made = cluster(d0=OLD, d1=OLD, d2=NEW)
    leaving = [replace(info(one, OLD), state="draining") for one in ("d0", "d1")]
    submit(made, resumed(OLD))
    first = made._entries["a"].life.assignment
    assert first is not None
    other = "d1" if first.decode == "d0" else "d0"
    made.workers_changed(leaving, 1.0)
    assert placements(submit(made, request("new"), 1.0)) == [("new", "d2")], "nothing new"
    assert placements(made.worker_lost(first.decode, 2.0)) == [("a", other)]
    refused = made.on_event(other, Refused("a", attempt(made, "a"), "draining"), 3.0)
    assert placements(refused) == [], "it is not asked again"
    assert placements(made.worker_found(info("d3", OLD), 4.0)) == [("a", "d3")]


def test_a_ready_worker_of_the_version_comes_before_a_draining_one() -> None:
    made = cluster(d0=OLD, d1=OLD, d2=OLD)
    submit(made, resumed(OLD))
    placed = made._entries["a"].life.assignment
    assert placed is not None
    others = sorted({"d0", "d1", "d2"} - {placed.decode})
    made.workers_changed([replace(info(others[0], OLD), state="draining")], 1.0)
    assert placements(made.worker_lost(placed.decode, 2.0, expected=True)) == [("a", others[1])]


def test_a_version_that_is_gone_for_good_ends_its_requests_with_a_reason() -> None:
    made = cluster(d0=OLD, d1=NEW)
    made.worker_lost("d1", 0.0, expected=True)
    submit(made, request("a", deadline=1000.0))
    token(made, "d0")
    made.worker_found(info("d1", NEW), 1.0)
    made.worker_lost("d0", 2.0, expected=True)
    assert made.tick(3.0) == []
    assert made.tick(2.9 + GONE_S) == []
    (end,) = [one for one in made.tick(3.0 + GONE_S) if isinstance(one, End)]
    assert isinstance(end.error, Unavailable)
    assert "'fp_old.same' generated the first 1 tokens" in end.error.message
    assert "send the request again from its start" in end.error.message


def test_at_its_deadline_it_says_which_version_is_missing() -> None:
    made = cluster(d0=OLD)
    submit(made, request("a", deadline=10.0))
    token(made, "d0")
    made.worker_found(info("d1", NEW), 1.0)
    made.worker_lost("d0", 2.0, expected=True)
    made.tick(3.0)
    (end,) = [one for one in made.tick(10.0) if isinstance(one, End)]
    assert end.error is not None
    assert "fp_old" in end.error.message


def test_without_any_worker_it_waits() -> None:
    made = cluster(d0=OLD)
    submit(made, request("a", deadline=1000.0))
    token(made, "d0")
    made.worker_lost("d0", 2.0, expected=True)
    assert made.tick(3.0) == []
    assert made.tick(4.0 + GONE_S) == []
    assert placements(made.worker_found(info("d1", OLD), 5.0 + GONE_S)) == [("a", "d1")]


def test_prefill_and_decode_of_a_retry_are_of_its_version() -> None:
    made = cluster(d0=OLD, p0=OLD)
    submit(made, request("a", LONG))
    (sent,) = [
        one
        for one in made.on_event("d0", Reserved("a", attempt(made, "a"), TARGET), 0.5)
        if isinstance(one, Send) and isinstance(one.command, Prefill)
    ]
    assert sent.worker_id == "p0"
    token(made, "p0")
    made.worker_found(info("p1", NEW), 1.0)
    made.worker_found(info("d1", OLD), 1.0)
    effects = made.worker_lost("d0", 2.0, expected=True)
    again = [one for one in effects if isinstance(one, Send) and isinstance(one.command, Reserve)]
    assert [(one.worker_id, one.command.prefill_worker) for one in again] == [("d1", "p0")]  # type: ignore[union-attr]


def resumed(model: ModelVersion, request_id: str = "a") -> Request:
    return replace(request(request_id), resume=(1, 2), model=model)


def test_an_answer_is_resumed_at_its_own_version() -> None:
    made = cluster(d0=NEW, d1=OLD)
    assert placements(submit(made, resumed(OLD))) == [("a", "d1")]


def test_a_resumed_answer_is_refused_at_another_version() -> None:
    made = cluster(d0=NEW)
    with pytest.raises(FailedPrecondition, match=r"fp_old\.same.*which no worker serves") as caught:
        submit(made, resumed(OLD))
    assert caught.value.field == "system_fingerprint"
    assert not made.unfinished


def test_a_worker_of_protocol_0_knows_as_much_as_it_says() -> None:
    made = cluster(d0=ModelVersion("", "same"))
    assert placements(submit(made, resumed(OLD))) == [("a", "d0")]


def test_a_resumed_answer_waits_for_its_version_and_blocks_nobody() -> None:
    made = cluster()
    submit(made, resumed(OLD))
    submit(made, request("b"))
    assert placements(made.worker_found(info("d0", NEW), 1.0)) == [("b", "d0")]
    assert placements(made.worker_found(info("d1", OLD), 2.0)) == [("a", "d1")]


@pytest.mark.parametrize(
    "text", ["fp_", "fp_a", "old", "fp_\x00.", "fp_" + "a" * 65 + ".", "fp_a.b\n", "gp_a.b"]
)
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resumed_model(GenerateRequest(system_fingerprint=text))
    assert caught.value.field == "system_fingerprint"


@given(
    st.from_regex(r"[a-f0-9]{0,64}", fullmatch=True),
    st.from_regex(r"[a-f0-9]{1,64}", fullmatch=True),
)
def test_a_fingerprint_is_read_back(full: str, sampled: str) -> None:
    model = ModelVersion(full, sampled)
    assert resumed_model(GenerateRequest(system_fingerprint=model.fingerprint)) == model


async def test_clients_are_told_the_version_and_held_to_it() -> None:
    async with running_router(prefill=0) as harness, inference_stub(harness.grpc) as stub:
        one = inference_pb.GenerateRequest(
            token_ids=SHORT, sampling=inference_pb.SamplingParams(max_tokens=4, seed=1)
        )
        responses = [response async for response in stub.Generate(one)]
        assert {responses[0].system_fingerprint, responses[-1].system_fingerprint} == {"fp_.fake"}
        tokens = [token for response in responses for token in response.token_ids]
        one.resume.extend(tokens[:2])
        one.system_fingerprint = "fp_.fake"
        rest = [token async for response in stub.Generate(one) for token in response.token_ids]
        assert rest == tokens[2:]
        one.system_fingerprint = "fp_.another"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(one).read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_which_workers_a_router_cannot_work_with() -> None:
    one = worker_info("d0", "decode")
    assert misfit(one, 100, "abc") == "", "what a worker does not say is not compared"
    assert misfit(replace(one, vocab_size=100, tokenizer_id="abc"), 100, "abc") == ""
    assert "vocabulary of 99" in misfit(replace(one, vocab_size=99, tokenizer_id="abc"), 100, "abc")
    assert "tokenizer xyz" in misfit(replace(one, vocab_size=100, tokenizer_id="xyz"), 100, "abc")
    assert "upgrade this end" in misfit(replace(one, protocol=Protocol(9, 9)))
    assert isinstance(assign([], 1, frozenset(), RouterConfig()), Wait)
