"""Workers that die, fail, are slow or leave, and requests that kill them: a whole router's core in
virtual time.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.router_books import check_books
from support.router_cluster import STEP_S, VirtualCluster

from kvrelay.errors import Code, FailedPrecondition, Internal, Unavailable
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import DRAINING, Failed, Prefill, RunLocal
from router.core.request import Request
from router.core.retry_budget import FLOOR, FLOOR_PER_S, RATIO
from router.core.workers.quarantine import QUARANTINE_S

LONG = tuple(range(20, 60))
SHORT = (1, 2, 3)


def ask(
    cluster: VirtualCluster, name: str, prompt: tuple[int, ...] = SHORT, tokens: int = 40
) -> None:
    sampling = SamplingParams(max_tokens=tokens, seed=3)
    cluster.submit(Request(name, prompt, sampling, cluster.now, cluster.now + 600.0))


def attempts(cluster: VirtualCluster) -> int:
    """Sequences that workers were asked to run."""
    return sum(
        isinstance(command, RunLocal)
        for worker in cluster.workers.values()
        for command in worker.commands
    )


# Deaths


def test_killing_a_worker_every_ten_seconds_costs_nobody_an_answer() -> None:
    cluster = VirtualCluster(2, 2)
    cluster.restart_s = 4.0
    random = Random(7)
    number = 0
    for step in range(int(120 / STEP_S)):
        if random.random() < 4.0 * STEP_S:
            number += 1
            prompt = tuple(random.randrange(100) for _ in range(random.choice((5, 40))))
            ask(cluster, f"r{number}", prompt, random.randint(5, 120))
        if step % int(10 / STEP_S) == 50:
            cluster.kill(random.choice(sorted(cluster.workers)))
        cluster.step()
    cluster.settle()
    check_books(cluster.dispatcher)
    assert len(cluster.deaths) == 12
    assert number > 400
    moved = [
        one for one in cluster.records.values() if one.request.request_id not in cluster.refused
    ]
    assert not cluster.refused
    assert all(one.whole for one in moved)


@pytest.mark.parametrize(
    ("dies_at", "workers"),
    [
        (0, 2),  # with its first step
        (5, 3),  # at its fifth token, counted from each attempt's first
    ],
)
@pytest.mark.parametrize("decode", [1, 2, 4])
def test_poison_is_stopped_and_others_are_unharmed(dies_at: int, workers: int, decode: int) -> None:
    cluster = VirtualCluster(0, decode)
    cluster.poisonous = lambda _worker, request_id, tokens: (
        request_id == "poison" and tokens == dies_at
    )
    for number in range(6):
        ask(cluster, f"r{number}", tokens=60)
        if number == 2:
            ask(cluster, "poison", (9, 9, 9))
    cluster.settle()
    assert len(cluster.deaths) == workers
    end = cluster.records.pop("poison").end
    assert end is not None
    assert isinstance(end.error, Internal)
    assert "not retried" in end.error.message
    assert all(one.whole for one in cluster.records.values())

    ask(cluster, "again", (9, 9, 9))
    assert isinstance(cluster.refused["again"], FailedPrecondition)
    cluster.now += QUARANTINE_S
    cluster.poisonous = lambda _worker, _request, _tokens: False
    ask(cluster, "later", (9, 9, 9))
    cluster.settle()
    assert cluster.records["later"].whole


def test_poison_at_one_place_of_the_answer_is_stopped() -> None:
    """The next attempt begins there, so it dies at once."""
    cluster = VirtualCluster(0, 2)

    def poisonous(_worker: str, request_id: str, _tokens: int) -> bool:
        return request_id == "poison" and len(cluster.records["poison"].tokens) >= 5

    cluster.poisonous = poisonous
    for name in ("a", "b", "poison", "c"):
        ask(cluster, name, tokens=60)
    cluster.settle()
    assert len(cluster.deaths) == 3
    assert len(cluster.records["poison"].tokens) >= 5
    assert all(one.whole for name, one in cluster.records.items() if name != "poison")


def test_poison_among_prompts_kills_two_prefill_workers() -> None:
    cluster = VirtualCluster(2, 2)
    cluster.poisonous = lambda worker, request_id, _tokens: (
        worker.startswith("p") and request_id == "poison"
    )
    for name in ("a", "poison", "b", "c"):
        ask(cluster, name, (*LONG, ord(name[0])))
    cluster.settle()
    assert [one[0] for one in cluster.deaths] == ["p", "p"]
    assert [name for name, one in cluster.records.items() if not one.whole] == ["poison"]


def test_a_worker_that_dies_again_and_again_gets_no_new_work() -> None:
    cluster = VirtualCluster(0, 2)
    cluster.restart_s = 0.1
    cluster.poisonous = lambda worker, _request, _tokens: worker == "d0"
    for number in range(200):
        ask(cluster, f"r{number}", tokens=5)
        cluster.run(0.2)
    cluster.settle()
    assert all(one.whole for one in cluster.records.values())
    assert len(cluster.deaths) < 12, "a few, and then a probe now and then"
    assert any("no new work" in one.text for one in cluster.notices)


# Drains


def test_leaving_a_draining_worker_costs_nothing() -> None:
    cluster = VirtualCluster(0, 2)
    while cluster.dispatcher.retries.withdraw(0.0):
        pass
    for number in range(4):
        ask(cluster, f"r{number}", tokens=200)
    cluster.run(1.0)
    for _ in range(8):  # more often than router.max_attempts
        worker_id = next(one for one, worker in cluster.workers.items() if worker.sequences)
        worker = cluster.workers[worker_id]
        for key in list(worker.sequences):
            del worker.sequences[key]
            cluster.hear(worker_id, Failed(*key, Code.UNAVAILABLE, DRAINING))
        assert [
            one.info.state for one in cluster.dispatcher._workers if one.info.worker_id == worker_id
        ] == ["draining"]
        cluster.run(0.5)
        cluster.dispatcher.workers_changed([replace(worker.info, state="ready")], cluster.now)
    cluster.settle()
    assert all(one.whole for one in cluster.records.values())
    assert cluster.dispatcher.sick == ()


@pytest.mark.parametrize("said_by", ["the registry", "the end of its session"])
def test_a_worker_lost_while_it_drains_costs_nothing(said_by: str) -> None:
    cluster = VirtualCluster(0, 2)
    for number in range(2):
        ask(cluster, f"r{number}", tokens=400)
    for _ in range(8):
        cluster.run(1.2)
        worker_id = next(one for one, worker in cluster.workers.items() if worker.sequences)
        if said_by == "the registry":
            info = replace(cluster.workers[worker_id].info, state="draining")
            cluster.dispatcher.workers_changed([info], cluster.now)
        lives = [entry.life for entry in cluster.dispatcher._entries.values()]
        cluster.kill(worker_id, expected=said_by != "the registry")
        assert all(life.failures == 0 and life.crashes.score == 0 for life in lives)
    cluster.settle()
    assert all(one.whole for one in cluster.records.values())


# Failures


def test_retries_of_a_sick_cluster_are_a_fifth_of_its_requests_and_a_few() -> None:
    cluster = VirtualCluster(0, 2)
    for worker in cluster.workers.values():
        worker.fail = Code.INTERNAL
    for number in range(500):
        ask(cluster, f"r{number}")
        cluster.run(STEP_S)
    cluster.settle()
    assert attempts(cluster) <= 500 * (1 + RATIO) + FLOOR + cluster.now * FLOOR_PER_S
    assert attempts(cluster) > 500
    errors = [one.end.error for one in cluster.records.values() if one.end is not None]
    refused = [one for one in errors if isinstance(one, Unavailable)]
    assert len(refused) > 300
    assert all(one.retry_after_s is not None for one in refused)


def test_a_failing_worker_gets_one_request_at_a_time_to_show_that_it_is_well() -> None:
    cluster = VirtualCluster(0, 2)
    sick = cluster.workers["d0"]
    sick.fail = Code.INTERNAL
    for number in range(100):
        ask(cluster, f"r{number}", tokens=3)
        cluster.run(0.2)
    tried = attempts(cluster) - 100
    assert 3 <= tried <= 9, "three, then after 1, 2, 4 and 8 seconds"
    assert [one.cause for one in cluster.dispatcher.sick] == ["failing"]
    sick.fail = None
    for number in range(100, 250):
        ask(cluster, f"r{number}", tokens=3)
        cluster.run(0.2)
    cluster.settle()
    assert cluster.dispatcher.sick == ()
    assert len([one for one in sick.commands if isinstance(one, RunLocal)]) > tried + 20
    assert all(one.whole for one in cluster.records.values())


def test_a_step_that_fails_its_whole_batch_is_one_failure() -> None:
    cluster = VirtualCluster(0, 2)
    for number in range(16):
        ask(cluster, f"r{number}")
    cluster.run(0.5)
    worker = cluster.workers["d0"]
    for key in list(worker.sequences):
        del worker.sequences[key]
        cluster.hear("d0", Failed(*key, Code.INTERNAL, "the model failed on this step"))
    assert cluster.dispatcher.sick == ()


def test_a_pair_that_cannot_hand_over_is_left_alone_and_both_go_on_with_others() -> None:
    cluster = VirtualCluster(2, 2)
    cut = {("p0", "d0")}
    cluster.cut = cut
    for number in range(60):
        ask(cluster, f"r{number}", (number, *LONG), tokens=3)
        cluster.run(0.2)
    cluster.settle()
    assert all(one.whole for one in cluster.records.values())
    used = {
        (worker_id, command.target.worker_id)
        for worker_id, worker in cluster.workers.items()
        for command in worker.commands
        if isinstance(command, Prefill)
    }
    assert used >= {("p0", "d1"), ("p1", "d0")}, "both go on with others"
    tries = [
        one
        for one in cluster.workers["p0"].commands
        if isinstance(one, Prefill) and one.target.worker_id == "d0"
    ]
    assert len(tries) <= 3, "one, then after 5 and 10 seconds"
    assert cluster.dispatcher.sick == (), "neither is blamed"


# Sequences that the model has no next token for


POISON = 99


def poisonous(spec: SequenceSpec) -> bool:
    return spec.token_ids[0] == POISON


def always(_: SequenceSpec) -> bool:
    return True


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (0, 3), (1, 1), (2, 2)])
def test_requests_that_no_worker_has_a_token_for_cost_two_attempts_and_harm_nobody(
    prefill: int, decode: int
) -> None:
    cluster = VirtualCluster(prefill, decode)
    for worker in cluster.workers.values():
        worker.faults = poisonous
    for number in range(400):
        poison = number % 5 != 0
        prompt = (POISON if poison else 1, number, *(LONG if number % 2 else SHORT))
        ask(cluster, f"{'bad' if poison else 'good'}-{number}", prompt, tokens=6)
        cluster.run(STEP_S)
        assert cluster.dispatcher.sick == (), "no worker is blamed"
    cluster.settle()
    for name, record in cluster.records.items():
        if name.startswith("good"):
            assert record.whole, name
        else:
            assert record.end is not None
            assert isinstance(record.end.error, Internal)
            assert "no distribution" in record.end.error.message
            assert "failed on it too" in record.end.error.message
    tried: dict[str, list[str]] = {}
    for worker_id, worker in cluster.workers.items():
        for command in worker.commands:
            if isinstance(command, RunLocal | Prefill):
                tried.setdefault(command.spec.request_id, []).append(worker_id)
    bad = {name: where for name, where in tried.items() if name.startswith("bad")}
    assert {len(where) for where in bad.values()} == {2}
    if prefill + decode > 1 and (prefill, decode) != (1, 1):
        assert all(len(set(where)) == 2 for where in bad.values()), "on two workers"
    assert cluster.dispatcher.retries.made == cluster.dispatcher.retries.refused == 0, (
        "others' retries are left to them"
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "sick"), [(0, 2, "d0"), (2, 1, "p0"), (1, 1, "p0"), (0, 3, "d2")]
)
def test_a_worker_that_has_no_token_where_others_have_one_is_blamed(
    prefill: int, decode: int, sick: str
) -> None:
    cluster = VirtualCluster(prefill, decode)
    cluster.workers[sick].faults = always
    for number in range(60):
        ask(cluster, f"r{number}", (number, *LONG), tokens=3)
        cluster.run(0.2)
    assert [(one.worker_id, one.cause) for one in cluster.dispatcher.sick] == [(sick, "failing")]
    cluster.workers[sick].faults = lambda _: False
    for number in range(60, 400):
        ask(cluster, f"r{number}", (number, *LONG), tokens=3)
        cluster.run(0.2)
    cluster.settle()
    assert cluster.dispatcher.sick == ()
    assert all(one.whole for one in cluster.records.values())
    assert cluster.dispatcher.retries.made == 0


def test_a_fault_that_comes_once_costs_a_retry_and_no_answer() -> None:
    cluster = VirtualCluster(0, 1)
    met: set[str] = set()

    def once(spec: SequenceSpec) -> bool:
        new = spec.request_id not in met
        met.add(spec.request_id)
        return new

    cluster.workers["d0"].faults = once
    for number in range(30):
        ask(cluster, f"r{number}", (number, *SHORT), tokens=6)
        cluster.run(0.2)
    cluster.settle()
    assert len(met) == 30
    assert all(one.whole for one in cluster.records.values())
    assert cluster.dispatcher.sick == ()


# Slow workers


@pytest.mark.parametrize("workers", [2, 3])
def test_a_slow_decode_worker_is_ejected_and_comes_back_when_it_is_well(workers: int) -> None:
    cluster = VirtualCluster(0, workers)
    cluster.slow["d0"] = 10
    for number in range(150):
        ask(cluster, f"r{number}", tokens=20)
        cluster.run(0.4)
    (sick,) = cluster.dispatcher.sick
    assert (sick.worker_id, sick.cause) == ("d0", "slow")
    assert "times as slow as the median" in sick.reason
    late = [
        one
        for one in cluster.records.values()
        if one.request.arrival > 30 and one.ended_at - one.request.arrival > 3
    ]
    assert len(late) <= 3, "only a probe now and then meets it"
    cluster.slow.clear()
    for number in range(150, 400):
        ask(cluster, f"r{number}", tokens=20)
        cluster.run(0.4)
    assert cluster.dispatcher.sick == ()
    cluster.settle()
    assert all(one.whole for one in cluster.records.values())


def test_the_last_worker_is_not_ejected_nor_are_workers_that_are_all_slow() -> None:
    cluster = VirtualCluster(0, 2)
    cluster.slow.update(d0=10, d1=12)
    for number in range(100):
        ask(cluster, f"r{number}", tokens=20)
        cluster.run(0.4)
    assert cluster.dispatcher.sick == ()


def test_load_makes_no_worker_slow() -> None:
    """Steps of a full batch take longer, and workers are not loaded alike."""
    cluster = VirtualCluster(0, 2, slots=16)
    for number in range(12):
        ask(cluster, f"r{number}", tokens=2000)
    cluster.run(1.0)
    for key in list(cluster.workers["d1"].sequences)[1:]:
        cluster.cancel(key[0])
    for _ in range(400):
        for worker_id, worker in cluster.workers.items():
            cluster.slow[worker_id] = 1 + len(worker.sequences)
        cluster.step()
    assert cluster.dispatcher.sick == ()


def test_a_slow_prefill_worker_is_ejected() -> None:
    cluster = VirtualCluster(3, 2)
    cluster.compute_s = {"p1": 0.001 * len(LONG) * 10}
    for number in range(60):
        ask(cluster, f"r{number}", (number, *LONG), tokens=3)
        cluster.run(0.2)
    (sick,) = cluster.dispatcher.sick
    assert (sick.worker_id, sick.cause) == ("p1", "slow")
    cluster.compute_s = {}
    for number in range(60, 160):
        ask(cluster, f"r{number}", (number, *LONG), tokens=3)
        cluster.run(0.2)
    assert cluster.dispatcher.sick == (), "one prompt shows that it is well"
