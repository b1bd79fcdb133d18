"""`kv.memory: auto`: never more than the memory, never less than a sequence, and the same in the
plan and in the worker.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ConfigError
from kvrelay.launch.checks.memory_plan import plan_memory
from kvrelay.models import resolve_model
from kvrelay.planning.auto_kv_memory import (
    HOST_SHARE,
    AutoKv,
    Room,
    activation_bytes,
    choose_kv_memory,
)
from kvrelay.process.free_memory import available_bytes
from kvrelay.process.machine import Machine
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.worker.runtime.auto_memory import AutoMemory
from kvrelay.worker.runtime.settings import WorkerSettings

GIB = 2**30
LAYOUT = KvLayout((LayerKv(8, 128, 128),) * 32, 32, "bfloat16")
BYTES = st.integers(0, 4 * 2**40)


def choose(room: Room, *, longest: int = 4096, weights: int = 2 * GIB, batch: int = 32) -> AutoKv:
    return choose_kv_memory(
        room,
        LAYOUT,
        longest=longest,
        max_batch=batch,
        weight_bytes=weights,
        activation_bytes=2**28,
    )


@given(BYTES, st.floats(0, 1), st.integers(1, 64), st.booleans(), BYTES, st.integers(1, 200_000))
def test_it_never_takes_what_is_not_there(
    total: int, share: float, workers: int, is_gpu: bool, weights: int, longest: int
) -> None:
    room = Room(total, int(share * total), workers, is_gpu)
    try:
        found = choose(room, longest=longest, weights=weights)
    except ConfigError:
        return
    assert found.kv_bytes % LAYOUT.block_bytes == 0
    assert found.kv_bytes >= LAYOUT.blocks_for(longest) * LAYOUT.block_bytes
    assert workers * (found.kv_bytes + weights) <= total
    # On a GPU, each worker sees what the others have taken.
    assert (1 if is_gpu else workers) * found.kv_bytes <= room.available
    if not is_gpu:
        assert workers * (found.kv_bytes + weights) <= HOST_SHARE * total
    assert str(workers) in found.reason


@given(st.integers(8, 400), st.integers(1, 8), st.integers(0, 200))
def test_more_memory_never_gives_less(gib: int, workers: int, more: int) -> None:
    small = Room(gib * GIB, gib * GIB, workers)
    large = replace(small, total=(gib + more) * GIB, available=(gib + more) * GIB)
    try:
        before = choose(small)
    except ConfigError:
        return
    assert choose(large).kv_bytes >= before.kv_bytes


def test_a_large_host_keeps_full_batches() -> None:
    found = choose(Room(2048 * GIB, 2048 * GIB, 1))
    assert found.limit == "batch"
    assert found.kv_bytes == 2 * 32 * LAYOUT.blocks_for(4096) * LAYOUT.block_bytes


def test_the_number_of_blocks_is_bounded() -> None:
    tiny = KvLayout((LayerKv(1, 8, 8),), 16, "bfloat16")
    room = Room(64 * GIB, 64 * GIB, 1)
    found = choose_kv_memory(
        room, tiny, longest=10**6, max_batch=4096, weight_bytes=0, activation_bytes=0
    )
    assert found.limit == "blocks"
    assert found.kv_bytes // tiny.block_bytes == 2**18


def test_a_busy_host_gives_what_is_free() -> None:
    idle, busy = Room(64 * GIB, 60 * GIB, 2), Room(64 * GIB, 10 * GIB, 2)
    assert choose(busy).kv_bytes <= 0.8 * 10 * GIB / 2 < choose(idle).kv_bytes


def test_too_little_memory_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError, match=r"one sequence of model.max_model_len = 100000 tokens"):
        choose(Room(8 * GIB, 8 * GIB, 2), longest=100_000)


def test_activations_follow_the_sizes_or_a_constant() -> None:
    assert activation_bytes({}, "bfloat16", 512, 32) == 256 * 2**20
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1000,
    }
    small = activation_bytes(sizes, "bfloat16", 512, 32)
    assert small == 512 * (2 * 64 + 3 * 128) * 2 + 32 * 1000 * 4
    assert activation_bytes(sizes, "float32", 512, 32) == 2 * small


def test_the_plan_and_the_worker_choose_alike() -> None:
    config = ClusterConfig.model_validate(
        {"kv": {"memory": "auto"}, "model": {"max_model_len": 512}, "decode": {"max_batch": 4}}
    )
    decode = plan_memory(config, Machine.here())[1]
    settings = WorkerSettings("d0", "decode", resolve_model("demo"), "", config)
    runner = ModelRunner.load(
        str(Path(resolve_model("demo"))), kv_bytes=AutoMemory(settings), max_model_len=512
    )
    try:
        assert runner.kv_bytes == decode.kv_bytes > 0
        assert decode.sequences == 2 * 4
    finally:
        runner.close()
    assert "full batches" in decode.auto


def test_an_unknown_host_is_left_to_the_worker() -> None:
    config = ClusterConfig.model_validate({"kv": {"memory": "auto"}})
    assert all("host is not known" in one.auto for one in plan_memory(config))
    gpu = ClusterConfig.model_validate(
        {"kv": {"memory": "auto"}, "decode": {"resources": {"num_gpus": 1}}}
    )
    prefill, decode = plan_memory(gpu, Machine.here())
    assert prefill.kv_bytes
    assert "GPU" in decode.auto


def test_a_pool_may_have_a_size_of_its_own() -> None:
    config = ClusterConfig.model_validate(
        {"kv": {"memory": "auto"}, "decode": {"kv": {"memory": "64MiB"}}}
    )
    prefill, decode = plan_memory(config, Machine.here())
    assert (decode.kv_bytes, decode.auto) == (64 * 2**20, "")
    assert prefill.auto


def test_free_memory_is_within_the_total() -> None:
    total = Machine.here().memory_bytes
    assert 0 <= available_bytes(total) <= total
    assert available_bytes(1) <= 1
