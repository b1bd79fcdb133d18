from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.config.model_sections import PolicyName, RouterConfig
from kvrelay.tenants import ANONYMOUS
from kvrelay.types.workers import ModelVersion
from router.core.path_policy import Assignment, Wait, assign
from router.core.worker_view import WorkerView

NOBODY = frozenset[str]()


def prefill(
    name: str, queued: int = 0, cached: int = 0, full: bool = False, last: int = 0
) -> WorkerView:
    return WorkerView(
        name, "prefill", full, queued_tokens=queued, cached_tokens=cached, last_assigned=last
    )


def decode(
    name: str, held: int = 0, cached: int = 0, full: bool = False, last: int = 0
) -> WorkerView:
    return WorkerView(
        name, "decode", full, held_tokens=held, cached_tokens=cached, last_assigned=last
    )


def config(policy: PolicyName = "kv_aware", local_below_tokens: int = 64) -> RouterConfig:
    return RouterConfig(policy=policy, local_below_tokens=local_below_tokens)


REACH = "uncached prompt tokens are at least local_below_tokens=64"


@pytest.mark.parametrize(
    ("workers", "num_tokens", "path", "why"),
    [
        ([decode("d"), prefill("p")], 12, "local", "12 uncached prompt tokens are below "
                                                   "local_below_tokens=64"),
        ([decode("d"), prefill("p")], 63, "local", "63 uncached prompt tokens are below "
                                                   "local_below_tokens=64"),
        ([decode("d"), prefill("p")], 64, "disaggregated", f"64 {REACH}; p is free "
                                                           "first, 0 tokens queued"),
        ([decode("d", cached=850), prefill("p")], 900, "local",
         "50 uncached prompt tokens are below local_below_tokens=64"),
        ([decode("d")], 900, "local", "no prefill worker is ready"),
        ([decode("d"), prefill("p", cached=512)], 900, "disaggregated", "p should hold 512 of 900 "
                                                                        "prompt tokens"),
    ],
)  # fmt: skip
def test_path_and_why(workers: list[WorkerView], num_tokens: int, path: str, why: str) -> None:
    decision = assign(workers, num_tokens, NOBODY, config())
    assert isinstance(decision, Assignment)
    assert (decision.path, decision.why_for(ANONYMOUS)) == (path, why)
    assert bool(decision.prefill) == (path == "disaggregated")


def test_a_sequence_that_dropped_tokens_stays_local() -> None:
    decision = assign([decode("d"), prefill("p")], 900, NOBODY, config(), drops_tokens=True)
    assert isinstance(decision, Assignment)
    assert (decision.path, decision.reason) == ("local", "dropped_tokens")
    assert decision.why == "d drops the same tokens of its KV as the worker before"
    full = assign([decode("d", full=True), prefill("p")], 900, NOBODY, config(), drops_tokens=True)
    assert isinstance(full, Wait)


@pytest.mark.parametrize(
    ("workers", "num_tokens", "why"),
    [
        ([decode("d"), prefill("p")], 12, "12 uncached prompt and answer tokens are below"),
        ([decode("d"), prefill("p")], 900, "900 uncached prompt and answer tokens are at least"),
        (
            [decode("d"), prefill("p", cached=512)],
            900,
            "p should hold 512 of 900 prompt and answer tokens",
        ),
    ],
)
def test_after_a_failure_the_reason_counts_the_tokens_of_the_answer(
    workers: list[WorkerView], num_tokens: int, why: str
) -> None:
    found = assign(workers, num_tokens, NOBODY, config(), has_answer=True)
    assert isinstance(found, Assignment)
    assert found.why.startswith(why)


@pytest.mark.parametrize(
    ("policy", "workers", "chosen"),
    [
        ("kv_aware", [prefill("p0", queued=300), prefill("p1", queued=200)], "p1"),
        ("kv_aware", [prefill("p0", queued=300, cached=512), prefill("p1", queued=200)], "p0"),
        ("kv_aware", [prefill("p0", queued=800, cached=512), prefill("p1", queued=200)], "p1"),
        ("least_loaded", [prefill("p0", queued=300, cached=512), prefill("p1", queued=200)], "p1"),
        ("round_robin", [prefill("p0", last=3), prefill("p1", queued=900, last=2)], "p1"),
        ("kv_aware", [prefill("p0", last=3), prefill("p1", last=2)], "p1"),
    ],
)
def test_choice_of_the_prefill_worker(
    policy: PolicyName, workers: list[WorkerView], chosen: str
) -> None:
    decision = assign([decode("d"), *workers], 900, NOBODY, config(policy))
    assert isinstance(decision, Assignment)
    assert decision.prefill == chosen


@pytest.mark.parametrize(
    ("policy", "workers", "chosen"),
    [
        ("kv_aware", [decode("d0", held=500), decode("d1", held=400)], "d1"),
        ("kv_aware", [decode("d0", held=500, cached=300), decode("d1", held=400)], "d0"),
        ("least_loaded", [decode("d0", held=500, cached=300), decode("d1", held=400)], "d1"),
        ("round_robin", [decode("d0", last=1), decode("d1", last=2)], "d0"),
        ("kv_aware", [decode("d0", full=True), decode("d1", held=9000)], "d1"),
    ],
)
def test_choice_of_the_decode_worker(
    policy: PolicyName, workers: list[WorkerView], chosen: str
) -> None:
    decision = assign([*workers, prefill("p")], 900, NOBODY, config(policy))
    assert isinstance(decision, Assignment)
    assert decision.decode == chosen


@pytest.mark.parametrize(
    ("workers", "why", "no_worker"),
    [
        ([], "no decode worker is ready", True),
        ([prefill("p")], "no decode worker is ready", True),
        (
            [decode("d0", full=True), decode("d1", full=True), prefill("p")],
            "all 2 decode workers are full",
            False,
        ),
        ([decode("d"), prefill("p", full=True)], "all 1 prefill workers are busy", False),
    ],
)
def test_waits(workers: list[WorkerView], why: str, no_worker: bool) -> None:
    found = assign(workers, 900, NOBODY, config())
    assert isinstance(found, Wait)
    assert (found.why, found.no_worker) == (why, no_worker)
    assert found.for_prefill == ("prefill" in why)


def test_workers_that_failed_the_request_are_the_last_resort() -> None:
    workers = [decode("d0"), decode("d1", held=9000), prefill("p0"), prefill("p1", queued=9000)]
    decision = assign(workers, 900, frozenset({"d0", "p0"}), config())
    assert isinstance(decision, Assignment)
    assert (decision.decode, decision.prefill) == ("d1", "p1")
    decision = assign([decode("d0"), prefill("p0")], 900, frozenset({"d0", "p0"}), config())
    assert isinstance(decision, Assignment)
    assert (decision.decode, decision.prefill) == ("d0", "p0")


def test_threshold_of_zero_never_takes_the_local_path_while_there_is_a_prefill_worker() -> None:
    decision = assign(
        [decode("d", cached=899), prefill("p")], 900, NOBODY, config(local_below_tokens=0)
    )
    assert isinstance(decision, Assignment)
    assert decision.path == "disaggregated"


def test_uncached_tokens_are_those_that_the_prefilling_worker_computes() -> None:
    decision = assign([decode("d", cached=100), prefill("p", cached=512)], 900, NOBODY, config())
    assert isinstance(decision, Assignment)
    assert decision.uncached_tokens == 388


def sick(worker: WorkerView) -> WorkerView:
    return replace(worker, sick=True)


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([sick(decode("d0")), decode("d1", held=900), prefill("p")], ("p", "d1")),
        # Rather than none
        ([sick(decode("d0")), sick(decode("d1", held=900)), prefill("p")], ("p", "d0")),
        # It will have room again
        ([sick(decode("d0")), decode("d1", full=True), prefill("p")], None),
        ([decode("d"), sick(prefill("p0")), prefill("p1", queued=900)], ("p1", "d")),
        ([decode("d"), sick(prefill("p0"))], ("", "d")),
    ],
)
def test_sick_workers_get_no_new_work(
    workers: list[WorkerView], chosen: tuple[str, str] | None
) -> None:
    decision = assign(workers, 900, NOBODY, config())
    assert (None if isinstance(decision, Wait) else (decision.prefill, decision.decode)) == chosen


@pytest.mark.parametrize(
    ("broken", "chosen", "why"),
    [
        (
            {("p0", "d")},
            "p1",
            f"900 {REACH}; p1 is free first, 900 tokens queued",
        ),
        (
            {("p0", "other")},
            "p0",
            f"900 {REACH}; p0 is free first, 0 tokens queued",
        ),
        ({("p0", "d"), ("p1", "d")}, "", "none of 2 prefill workers is fit and can hand over to d"),
    ],
)
def test_pairs_that_cannot_hand_over_are_not_chosen(
    broken: set[tuple[str, str]], chosen: str, why: str
) -> None:
    workers = [decode("d"), prefill("p0"), prefill("p1", queued=900)]
    decision = assign(workers, 900, NOBODY, config(), frozenset(broken))
    assert isinstance(decision, Assignment)
    assert (decision.prefill, decision.why_for(ANONYMOUS)) == (chosen, why)


def test_the_model_version_whose_prefill_worker_has_room_is_preferred() -> None:
    old, new = ModelVersion("old", "old"), ModelVersion("new", "new")
    workers = [
        replace(decode("d_old"), model=old),
        replace(prefill("p_old", full=True), model=old),
        replace(decode("d_new", held=500), model=new),
        replace(prefill("p_new"), model=new),
    ]
    decision = assign(workers, 900, NOBODY, config())
    assert isinstance(decision, Assignment)
    assert (decision.prefill, decision.decode) == ("p_new", "d_new")
    full = [replace(one, full=one.pool == "prefill") for one in workers]
    assert isinstance(assign(full, 900, NOBODY, config()), Wait)


def test_an_equally_fast_prefill_worker_on_the_decode_workers_host_is_preferred() -> None:
    here = replace(prefill("here", last=9), host_id="a")
    there = replace(prefill("there", last=1), host_id="b")
    decoder = replace(decode("d"), host_id="a")
    for order in ([here, there], [there, here]):
        placed = assign([decoder, *order], 900, NOBODY, config())
        assert isinstance(placed, Assignment)
        assert placed.prefill == "here"
    placed = assign([decoder, replace(here, queued_tokens=1), there], 900, NOBODY, config())
    assert isinstance(placed, Assignment)
    assert placed.prefill == "there", "a host matters among equals alone"


def test_a_source_on_the_prefill_workers_host_is_preferred() -> None:
    target = replace(prefill("p"), host_id="a", block_size=16)
    sources = [
        replace(decode("far", cached=160), host_id="b", block_size=16),
        replace(decode("near", cached=160), host_id="a", block_size=16),
        replace(decode("other", cached=144, held=0), host_id="a", block_size=16),
    ]
    for order in (sources, sources[::-1]):
        placed = assign([target, *order], 900, NOBODY, config())
        assert isinstance(placed, Assignment)
        assert placed.source is not None
        assert placed.source.worker_id == "near"
        assert placed.cached_tokens == placed.source.cached_tokens == 160


@pytest.mark.parametrize(
    ("exact", "coming", "why"),
    [
        (False, 0, "p should hold 512 of 900 prompt tokens"),
        (True, 0, "p holds 512 of 900 prompt tokens"),
        (True, 256, "p will hold 512 of 900 prompt tokens"),
    ],
)
def test_why_tells_how_certain_it_is(exact: bool, coming: int, why: str) -> None:
    worker = replace(prefill("p", cached=512), exact=exact, coming_tokens=coming)
    placed = assign([decode("d"), worker], 900, NOBODY, config())
    assert isinstance(placed, Assignment)
    assert placed.why == why
    assert placed.cached_tokens == 512


def test_what_a_worker_has_yet_to_compute_is_not_fetched_from_it() -> None:
    busy = replace(
        prefill("busy", cached=640, queued=10_000), exact=True, coming_tokens=640, block_size=16
    )
    placed = assign(
        [decode("d"), busy, replace(prefill("idle"), block_size=16)], 900, NOBODY, config()
    )
    assert isinstance(placed, Assignment)
    assert placed.prefill == "idle"
    assert placed.source is None
