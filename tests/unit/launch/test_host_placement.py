"""Where workers go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config.pools import Resources
from kvrelay.launch.host_placement import Node, needs, place, with_workers
from kvrelay.types.workers import POOLS, PoolName

ONE = {"CPU": 1.0}


def node(number: int, cpus: float = 2, free: float | None = None, **more: float) -> Node:
    total = {"CPU": cpus, "memory": 2e9, **more}
    return Node(
        f"{number:02x}", f"10.0.0.{number}", total, {**total, "CPU": cpus if free is None else free}
    )


def placed(pools: list[PoolName], nodes: list[Node]) -> list[tuple[str, PoolName]]:
    """(address, pool) of workers that are started one after the other, while Ray's word on the
    nodes stays the old.
    """
    workers: list[tuple[str, PoolName, dict[str, float]]] = []
    found: list[tuple[str, PoolName]] = []
    for pool in pools:
        chosen = place(pool, ONE, with_workers(nodes, workers)).node
        if chosen is not None:
            workers.append((chosen.node_id, pool, ONE))
            found.append((chosen.address, pool))
    return found


@pytest.mark.parametrize(
    "order", [["prefill", "prefill", "decode", "decode"], ["decode", "prefill"] * 2], ids=str
)
def test_two_and_two_on_three_nodes_survive_the_loss_of_any(order: list[PoolName]) -> None:
    found = placed(order, [node(1), node(2), node(3)])
    assert len(found) == 4
    for lost in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        assert {pool for address, pool in found if address != lost} == set(POOLS)


@given(st.lists(st.sampled_from(POOLS), max_size=12), st.integers(1, 5))
def test_each_pool_is_spread_and_no_node_is_overfilled(pools: list[PoolName], count: int) -> None:
    found = placed(pools, [node(number, cpus=12) for number in range(count)])
    assert Counter(pool for _, pool in found) == Counter(pools)
    for pool in POOLS:
        each = Counter(address for address, other in found if other == pool)
        sizes = [each[f"10.0.0.{number}"] for number in range(count)]
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.sampled_from(POOLS), max_size=12), st.lists(st.integers(0, 3), max_size=5))
def test_who_finds_no_room_waits(pools: list[PoolName], cpus: list[int]) -> None:
    nodes = [node(number, amount) for number, amount in enumerate(cpus)]
    found = placed(pools, nodes)
    assert len(found) == min(len(pools), sum(cpus)), (
        "somebody waits although there is room, or the other way round"
    )
    assert all(
        Counter(address for address, _ in found)[one.address] <= one.total["CPU"] for one in nodes
    )


def test_the_reason_says_what_was_compared() -> None:
    nodes = with_workers([node(1), node(2)], [("01", "prefill", ONE)])
    decision = place("prefill", ONE, nodes)
    assert (
        decision.reason
        == "10.0.0.2 has the fewest prefill workers (0), then workers (0), of 2 nodes with room"
    )


@pytest.mark.parametrize(
    ("amounts", "nodes", "reason"),
    [
        ({"CPU": 1.0}, [], "no Ray node is there that has room for 1 logical CPU"),
        (
            {"CPU": 1.0},
            [node(1, free=0.5), node(2, cpus=0)],
            "no Ray node has room for 1 logical CPU: 10.0.0.1 has 0.5 of 2 logical CPUs free; "
            "10.0.0.2 has 0 of 0 logical CPUs free",
        ),
        (
            {"CPU": 1.0, "GPU": 2.0, "decode": 0.5},
            [node(1, GPU=1), node(2), node(3), node(4), node(5)],
            "no Ray node is large enough for 1 logical CPU, 2 GPU, 0.5 decode: 10.0.0.1 has 2 of 2 "
            "logical CPUs free, 1 of 1 GPU free, 0 of 0 decode free; 10.0.0.2 has 2 of 2 logical "
            "CPUs free, 0 of 0 GPU free, 0 of 0 decode free; 10.0.0.3 has 2 of 2 logical CPUs "
            "free, 0 of 0 GPU free, 0 of 0 decode free; and 2 more nodes",
        ),
    ],
)
def test_why_nowhere(amounts: dict[str, float], nodes: list[Node], reason: str) -> None:
    decision = place("decode", amounts, nodes)
    assert decision.node is None
    assert decision.reason == reason


def test_custom_resources_bind_a_pool_to_its_nodes() -> None:
    section = Resources(num_cpus=1, custom={"decode": 1})
    assert place("decode", needs(section), [node(1), node(2, decode=1)]).reason.startswith(
        "10.0.0.2 "
    )


def test_a_tensor_parallel_group_is_reserved_for_as_a_whole() -> None:
    """Its ranks are processes of one actor, which asks for the resources of all; three nodes with a
    GPU are none.
    """
    group = needs(Resources(num_cpus=2, num_gpus=2))
    assert place("decode", group, [node(1, GPU=1), node(2, GPU=1), node(3, GPU=1)]).node is None
    assert place("decode", group, [node(1, GPU=1), node(2, GPU=2)]).reason.startswith("10.0.0.2 ")


def test_what_others_took_is_taken() -> None:
    assert place(
        "decode", ONE, with_workers([node(1, free=0), node(2, free=1)], [])
    ).reason.startswith("10.0.0.2 ")
