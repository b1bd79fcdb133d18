"""A request with options that older workers ignore runs only where they are known, and delays
nobody else.
"""

from __future__ import annotations

from dataclasses import replace

from support.dispatched import LONG, SHORT, TARGET, attempt, placements, request, submit
from support.fake_worker import worker_info

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Unimplemented
from kvrelay.protocol_version import GUIDANCE, Protocol, ours
from kvrelay.types.requests import Guidance
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker_messages import Prefill, Reserved
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, End, Send
from router.core.request import Request

# A worker of the release before guidance.
OLD = Protocol(1, 0, ("full_model_id", "system_fingerprint", "unknown_ignored"))


def info(name: str, protocol: Protocol) -> WorkerInfo:
    return replace(
        worker_info(name, "prefill" if name.startswith("p") else "decode"), protocol=protocol
    )


def cluster(max_batch: int = 4, **workers: Protocol) -> Dispatcher:
    made = Dispatcher(
        ClusterConfig.model_validate(
            {
                "router": {"local_below_tokens": 8},
                "decode": {"max_batch": max_batch},
                "kv": {"block_size": 16},
            }
        )
    )
    for name, protocol in workers.items():
        made.worker_found(info(name, protocol), 0.0)
    return made


def guided(request_id: str, token_ids: tuple[int, ...] = SHORT) -> Request:
    one = request(request_id, token_ids)
    return replace(one, sampling=replace(one.sampling, guidance=Guidance("regex", "a")))


def ends(effects: list[Effect]) -> list[End]:
    return [one for one in effects if isinstance(one, End)]


def test_guidance_goes_to_the_worker_that_knows_it_although_the_other_is_idle() -> None:
    made = cluster(d0=OLD, d1=ours())
    for number in range(3):
        assert placements(submit(made, guided(f"g{number}"))) == [(f"g{number}", "d1")]
    assert placements(submit(made, request("free"))) == [("free", "d0")]


def test_an_older_prefill_worker_gets_no_prompt_with_guidance() -> None:
    made = cluster(p0=OLD, d0=ours())
    assert placements(submit(made, guided("g", LONG))) == [("g", "d0")]
    assert made._entries["g"].life.path == "local"
    made.worker_found(info("p1", ours()), 0.0)
    submit(made, guided("h", LONG))
    effects = made.on_event("d0", Reserved("h", attempt(made, "h"), TARGET), 0.0)
    assert [
        one.worker_id
        for one in effects
        if isinstance(one, Send) and isinstance(one.command, Prefill)
    ] == ["p1"]


def test_guidance_that_no_worker_knows_is_refused_at_once_with_what_to_do() -> None:
    made = cluster(d0=OLD, p0=ours())
    (end,) = ends(submit(made, guided("g")))
    assert isinstance(end.error, Unimplemented)
    assert end.error.field == "guidance"
    assert "upgrade the workers" in end.error.message
    assert made.unfinished == 0
    assert placements(submit(made, request("free"))) == [("free", "d0")]


def test_all_options_that_no_worker_knows_are_named() -> None:
    guidance_only = Protocol(1, 0, (*OLD.features, GUIDANCE))
    one = guided("both")
    one = replace(one, sampling=replace(one.sampling, prompt_logprobs=2))
    (end,) = ends(submit(cluster(d0=OLD), one))
    assert isinstance(end.error, Unimplemented)
    assert "without guidance and prompt_logprobs" in end.error.message
    assert ends(submit(cluster(d0=guidance_only), one)) != []
    assert placements(submit(cluster(d0=guidance_only, d1=ours()), one)) == [("both", "d1")]


def test_a_request_loses_its_last_worker_with_guidance_and_fails_instead_of_running_freely() -> (
    None
):
    made = cluster(d0=ours())
    submit(made, guided("g"))
    assert ends(made.worker_lost("d0", 1.0)) == []
    (end,) = ends(made.worker_found(info("d1", OLD), 2.0))
    assert isinstance(end.error, Unimplemented)


def test_those_without_guidance_do_not_wait_for_one_that_finds_no_room() -> None:
    made = cluster(max_batch=1, d0=OLD, d1=ours())
    submit(made, guided("g0"))
    assert placements(submit(made, guided("g1"))) == []
    assert placements(submit(made, request("free"))) == [("free", "d0")]
    assert made.waiting == 1
    assert placements(made.worker_found(info("d2", ours()), 1.0)) == [("g1", "d2")]
