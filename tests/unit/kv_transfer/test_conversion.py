"""KV from one layout to another, token by token against a naive copy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.transfer_ends import KEY, decode_end, sender_of

from kv_transfer.blocks.conversion import Span, convert
from kv_transfer.blocks.plan import Layers, Places
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.quantised_kv import dequantise, rotate
from kvrelay.types.kv_layout import KvLayout, LayerKv

LATENT = LayerKv(1, 40, 32, v_in_k=True)
LAYERS = (LayerKv(2, 64, 32), LATENT, LayerKv(1, 32, 40), LayerKv(2, 32, 96))
EVEN = (LayerKv(4, 64, 32), LayerKv(8, 32, 40))
EVERY = Layers(0, len(LAYERS))


def naive_at(
    pool: KvPool, layer: int, side: int, block: int, token: int, head: int
) -> torch.Tensor:
    """One vector, [dim] float32, by the description of the layout alone."""
    layout, shape = pool.layout, pool.layout.layers[layer]
    dim = shape.v_dim if side else shape.k_dim
    share = layout.share.layers[layer].kv_heads
    if head >= share:  # another rank's
        pool, head = (
            KvPool(
                layout, pool.num_blocks, rank=head // share, of_rank_0=f"/proc/self/fd/{pool.fd}"
            ),
            head % share,
        )
    views = pool.layers[layer]
    region, scale = (views.v, views.v_scale) if side else (views.k, views.k_scale)
    size, word, panel = layout.block_size, layout.word, 32
    if layout.dtype == "int4":
        dim, word, panel = dim // 2, word and 1, 16
    if not word:
        vector = region[block, token, head]
    else:
        flat = region[block, head]
        if side == 0:
            group = 32 if size % 32 == 0 else 16
            places = [
                token // group * group * dim
                + i // word * group * word
                + token % group * word
                + i % word
                for i in range(dim)
            ]
        else:
            places = []
            for i in range(dim):
                first = i // panel * panel
                width = min(panel, dim - first)
                places.append(
                    first * size + token // word * width * word + (i - first) * word + token % word
                )
        vector = flat[places]
    if scale is None:
        return vector.float()
    factor = scale[block, head, token] if word else scale[block, token, head]
    return dequantise(vector, factor, torch.float32, keys=side == 0)


def pool_of(layout: KvLayout, num_blocks: int, seed: int) -> KvPool:
    """Random KV, every vector of its own."""
    pool = KvPool(layout, num_blocks)
    generator = torch.Generator().manual_seed(seed)
    others = [
        KvPool(layout, num_blocks, rank=rank, of_rank_0=f"/proc/self/fd/{pool.fd}")
        for rank in range(1, layout.ranks)
    ]
    for layer in (layer for one in (pool, *others) for layer in one.layers):
        for region in layer.regions:
            if region.dtype is torch.int8:
                region.copy_(
                    torch.randint(-127, 128, region.shape, generator=generator, dtype=torch.int8)
                )
            elif region.dtype is torch.uint8:
                values = torch.randint(-7, 8, (*region.shape, 2), generator=generator) + 8
                region.copy_(values[..., 0] | values[..., 1] << 4)
            else:
                region.copy_(torch.rand(region.shape, generator=generator) + 0.5)
    return pool


def span(pool: KvPool, blocks: list[int], start: int, layers: Layers = EVERY) -> Span:
    return Span(
        pool.buffer,
        pool.layout,
        Places.of_arena(pool.layout, pool.num_blocks, layers),
        blocks,
        start,
    )


LAYOUTS = st.sampled_from(
    [
        KvLayout(LAYERS, 4, "float32"),
        KvLayout(LAYERS, 16, "float32"),
        KvLayout(LAYERS, 16, "bfloat16"),
        KvLayout(LAYERS, 16, "float32", word=1),
        KvLayout(LAYERS, 32, "float32", word=1),
        KvLayout(LAYERS, 16, "bfloat16", word=2),
        KvLayout(LAYERS, 32, "bfloat16", word=2),
        KvLayout(LAYERS, 8, "int8"),
        KvLayout(LAYERS, 32, "int8", word=2),
        KvLayout(LAYERS, 8, "int4"),
        KvLayout(LAYERS, 16, "int4", word=1),
        KvLayout(LAYERS, 32, "int4", word=2),
    ]
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, 10**6))
def test_each_vector_arrives_and_nothing_else_changes(
    ours: KvLayout, theirs: KvLayout, seed: int
) -> None:
    rng = random.Random(seed)
    source, target = pool_of(theirs, 10, seed), pool_of(ours, 10, seed + 1)
    before = target.buffer.clone()
    begin = rng.randrange(40)
    tokens = range(begin, begin + rng.randint(1, 30))

    def blocks_of(layout: KvLayout) -> tuple[list[int], int]:
        first, last = tokens.start // layout.block_size, layout.blocks_for(tokens.stop)
        return rng.sample(range(10), last - first), first * layout.block_size

    (from_blocks, from_start), (to_blocks, to_start) = blocks_of(theirs), blocks_of(ours)
    convert(span(source, from_blocks, from_start), span(target, to_blocks, to_start), tokens, EVERY)

    untouched = KvPool(ours, 10)
    untouched.buffer.copy_(before)
    exact = theirs.dtype == ours.dtype or (theirs.dtype, ours.dtype) == ("bfloat16", "float32")
    for layer, shape in enumerate(LAYERS):
        for side, _ in enumerate(shape.stored_dims):
            for head in range(shape.kv_heads):
                for token in tokens:
                    at = (token - from_start, token - to_start)
                    (a, i), (b, j) = (
                        divmod(at[0], theirs.block_size),
                        divmod(at[1], ours.block_size),
                    )
                    sent = naive_at(source, layer, side, from_blocks[a], i, head)
                    arrived = naive_at(target, layer, side, to_blocks[b], j, head)
                    if exact:
                        assert torch.equal(sent, arrived)
                    else:
                        if ours.dtype == "int4" and side == 0:
                            sent, arrived = rotate(sent), rotate(arrived)
                        largest = 7 if ours.dtype == "int4" else 127
                        assert (sent - arrived).abs().max() <= 0.51 / largest * sent.abs().max()
    given = {token - to_start for token in tokens}
    for number in range(10):
        for token in range(ours.block_size):
            place = (
                to_blocks.index(number) * ours.block_size + token if number in to_blocks else None
            )
            if place not in given:
                old, new = (naive_at(pool, 2, 1, number, token, 0) for pool in (untouched, target))
                assert torch.equal(old, new)


@pytest.mark.parametrize("word", [None, 2])
def test_a_group_of_layers(word: int | None) -> None:
    layout = KvLayout(LAYERS, 16, "bfloat16", word)
    source, target = pool_of(layout, 2, 1), pool_of(replace(layout, block_size=32), 2, 2)
    before = target.buffer.clone()
    some = Layers(1, 2)
    convert(span(source, [1, 0], 0, some), span(target, [1], 0, some), range(32), some)
    assert torch.equal(naive_at(source, 1, 0, 0, 3, 0), naive_at(target, 1, 0, 1, 19, 0))
    assert torch.equal(naive_at(source, 2, 1, 0, 3, 0), naive_at(target, 2, 1, 1, 19, 0))
    size = target.layout.region_block_bytes[0] * 2
    assert torch.equal(target.buffer[:size], before[:size])
    assert not torch.equal(target.buffer, before)


@pytest.mark.parametrize("word", [None, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_one_workers_heads_become_ranks_shares_and_come_together_again(
    dtype: str, word: int | None
) -> None:
    """A rank sees in its own arena, which is a part of the whole one, the heads that are its
    own.
    """
    layers = (LayerKv(4, 32, 64), LayerKv(4, 32, 8, v_in_k=True))
    whole, shared = KvLayout(layers, 16, dtype, word), KvLayout(layers, 32, dtype, word, ranks=2)
    one, ranks, again = pool_of(whole, 4, 1), pool_of(shared, 2, 2), pool_of(whole, 4, 4)
    two, tokens = Layers(0, 2), range(60)
    convert(span(one, [3, 1, 0, 2], 0, two), span(ranks, [1, 0], 0, two), tokens, two)
    convert(span(ranks, [1, 0], 0, two), span(again, [0, 1, 2, 3], 0, two), tokens, two)
    for layer, shape in enumerate(layers):
        for side, _ in enumerate(shape.stored_dims):
            for token in tokens:
                for head in range(4):
                    sent = naive_at(one, layer, side, [3, 1, 0, 2][token // 16], token % 16, head)
                    assert torch.equal(
                        sent, naive_at(again, layer, side, token // 16, token % 16, head)
                    )
                    if token % 9 == 0:
                        between = naive_at(
                            ranks, layer, side, [1, 0][token // 32], token % 32, head
                        )
                        assert torch.equal(sent, between)


def test_the_order_is_the_one_that_the_kernels_write(tiny_model: Callable[..., Path]) -> None:
    """What the engine computed with kernels is what it computed without, once it is in the same
    order.
    """
    from kvrelay.engine.runner import ModelRunner
    from kvrelay.engine.sequence_segment import Segment

    folder = str(tiny_model("llama"))
    native = ModelRunner.load(folder, block_size=32, kv_bytes=1 << 20, max_model_len=128)
    if native.kernels != "native":
        pytest.skip(native.without_kernels)
    plain = ModelRunner.load(
        folder, block_size=4, kv_bytes=1 << 20, max_model_len=128, kernels="torch"
    )
    prompt = [2 + i * 7 % 90 for i in range(70)]
    native.run([Segment(prompt, 0, [3, 0, 2])])
    tables = list(range(18))
    plain.run([Segment(prompt, 0, tables)])
    moved = KvPool(plain.layout, plain.num_blocks)
    num_layers = Layers(0, len(plain.layout.layers))
    convert(
        Span(
            native.kv.buffer,
            native.layout,
            Places.of_arena(native.layout, native.num_blocks),
            [3, 0, 2],
            0,
        ),
        Span(
            moved.buffer, moved.layout, Places.of_arena(moved.layout, moved.num_blocks), tables, 0
        ),
        range(70),
        num_layers,
    )
    for ours, theirs in zip(moved.layers, plain.kv.layers, strict=True):
        for side in ("k", "v"):
            a, b = getattr(ours, side).flatten(0, 1)[:70], getattr(theirs, side).flatten(0, 1)[:70]
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo", "apart"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (KvLayout(LAYERS, 16, "float32"), KvLayout(LAYERS, 32, "float32")),
        (KvLayout(LAYERS, 32, "bfloat16", 2), KvLayout(LAYERS, 16, "bfloat16")),
        (KvLayout(LAYERS, 16, "bfloat16", 2), KvLayout(LAYERS, 32, "int8", 2)),
        (KvLayout(LAYERS, 32, "int8", 2), KvLayout(LAYERS, 16, "bfloat16", 2)),
        (KvLayout(LAYERS, 8, "float32"), KvLayout(LAYERS, 12, "float32")),
        (KvLayout(EVEN, 16, "bfloat16", ranks=2), KvLayout(EVEN, 32, "bfloat16", 2)),
        (KvLayout(EVEN, 16, "bfloat16", 2), KvLayout(EVEN, 16, "bfloat16", ranks=2)),
        (KvLayout(EVEN, 16, "float32", ranks=2), KvLayout(EVEN, 16, "float32", ranks=2)),
        (KvLayout(EVEN, 8, "int8", ranks=2), KvLayout(EVEN, 16, "int8", ranks=4)),
        (KvLayout(LAYERS, 16, "bfloat16", 2), KvLayout(LAYERS, 32, "int4", 2)),
        (KvLayout(EVEN, 8, "int4", ranks=2), KvLayout(EVEN, 16, "int4", 2)),
    ],
)
async def test_unlike_workers_hand_over(transport: str, theirs: KvLayout, ours: KvLayout) -> None:
    """100 tokens, of which the receiver has its first block already; in runs of one and more
    blocks, layer by layer.

    Apart are ranks' shares that lie in memories of their own, as on GPUs.
    """
    apart, transport = transport == "apart", "grpc" if transport == "apart" else transport
    source = pool_of(theirs, 14, 1)
    async with (
        decode_end(ours, 12, layout_hash=ours.hash("test")) as decode,
        sender_of(source, layout_hash=theirs.hash("test")) as sender,
    ):
        decode.arena.buffer.copy_(pool_of(ours, 12, 2).buffer)
        if apart:
            source.shares, decode.arena.shares = (
                source.buffer.chunk(theirs.ranks),
                decode.arena.buffer.chunk(ours.ranks),
            )
        num_blocks, first = theirs.blocks_for(100), ours.block_size // theirs.block_size
        blocks = random.Random(0).sample(range(14), num_blocks)
        lease = random.Random(1).sample(range(12), ours.blocks_for(100))
        push = sender.open(KEY, decode.grant(lease, cached_blocks=1, transport=transport))
        push.send(first, blocks[first : first + 1], Layers(0, 1))
        push.send(first, blocks[first : first + 1], Layers(1, len(ours.layers) - 1))
        push.send(first + 1, blocks[first + 1 :])
        handoff = await push.commit(1, 100, 0.0)
        assert handoff.bytes == (num_blocks - first) * theirs.block_bytes
        target, before = KvPool(ours, 12), pool_of(ours, 12, 2)
        target.buffer.copy_(decode.arena.buffer)
    for layer, shape in enumerate(ours.layers):
        for side, _ in enumerate(shape.stored_dims):
            for token in range(100):
                (a, i), (b, j) = divmod(token, theirs.block_size), divmod(token, ours.block_size)
                head = token % shape.kv_heads
                arrived = naive_at(target, layer, side, lease[b], j, head)
                sent = naive_at(source, layer, side, blocks[a], i, head)
                if b == 0:
                    assert torch.equal(arrived, naive_at(before, layer, side, lease[0], j, head)), (
                        "was cached"
                    )
                elif ours.is_quantised and ours.dtype != theirs.dtype:
                    if ours.dtype == "int4" and side == 0:
                        sent, arrived = rotate(sent), rotate(arrived)
                    allowed = 0.51 / (7 if ours.dtype == "int4" else 127) * float(sent.abs().max())
                    torch.testing.assert_close(arrived, sent, rtol=0, atol=allowed)
                else:
                    assert torch.equal(
                        arrived, sent.bfloat16().float() if ours.dtype == "bfloat16" else sent
                    )
