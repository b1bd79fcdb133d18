"""Hand-offs of models with sliding windows: which layers of which blocks are sent and taken."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.blocks.plan import Layers, Places
from kv_transfer.frame_validator import FrameValidator
from kv_transfer.lease import LeaseTable
from kv_transfer.push import needed_runs
from kv_transfer.push_frames import Run
from kvrelay.errors import DataLoss
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.transfer import KvBlocks, KvCommit, commit_digest

# The window of the windowed layers, in tokens and in blocks.
WINDOW, SIZE = 129, 16
PROMPT = 40 * SIZE
FIRST = 32


def layout(*windows: int) -> KvLayout:
    return KvLayout((LayerKv(1, 8, 8),) * len(windows), SIZE, "float32", windows=windows)


def validator(ours: KvLayout, cached_blocks: int = 0) -> FrameValidator:
    lease = LeaseTable(1).grant(("r", 0), range(40), cached_blocks, 10.0, 0.0, num_tokens=PROMPT)
    return FrameValidator(lease, ours, ours)


def frames(ours: KvLayout, runs: list[Run]) -> list[KvBlocks]:
    return [
        KvBlocks(
            number,
            run.first,
            len(run.blocks),
            run.layers.first,
            run.layers.num,
            len(run.blocks) * Places.of_payload(ours, 1, run.layers).block_bytes,
        )
        for number, run in enumerate(runs)
    ]


def check(found: FrameValidator, sent: list[KvBlocks]) -> None:
    for frame in sent:
        found.check(frame)
        found.add(frame)
    digest = commit_digest(found._digest, 5, PROMPT)
    found.check_complete(KvCommit(len(sent), digest, 5, PROMPT))


@given(
    windows=st.lists(st.sampled_from([0, WINDOW]), min_size=1, max_size=7).filter(any),
    cuts=st.sets(st.integers(1, 39), max_size=6),
    groups=st.integers(1, 7),
    cached=st.integers(0, 39),
)
def test_what_is_sent_is_what_is_taken(
    windows: list[int], cuts: set[int], groups: int, cached: int
) -> None:
    """However a prompt is cut into chunks, and a chunk into groups of layers."""
    ours = layout(*windows)
    assert ours.first_block(PROMPT) == FIRST
    ends = sorted({cached, *(cut for cut in cuts if cut > cached), 40})
    edges = [*range(0, len(windows), groups), len(windows)]
    runs = [
        part
        for start, end in pairwise(ends)
        for low, high in pairwise(edges)
        for part in needed_runs(
            ours, Run(start, range(100 + start, 100 + end), Layers(low, high - low)), FIRST
        )
    ]
    check(validator(ours, cached), frames(ours, runs))
    sent = {
        (place, layer)
        for run in runs
        for place in range(run.first, run.first + len(run.blocks))
        for layer in range(run.layers.first, run.layers.first + run.layers.num)
    }
    assert sent == {
        (place, layer)
        for place in range(cached, 40)
        for layer, window in enumerate(windows)
        if not window or place >= FIRST
    }
    for run in runs:
        assert list(run.blocks) == list(range(100 + run.first, 100 + run.first + len(run.blocks)))


def test_layers_behind_the_window_are_refused() -> None:
    """The lease has no memory for them."""
    ours = layout(0, WINDOW)
    found = validator(ours)
    (frame,) = frames(ours, [Run(FIRST - 1, [7], Layers(0, 2))])
    with pytest.raises(DataLoss, match="contains windowed layers of block 31"):
        found.check(frame)


def test_layers_in_the_window_must_come() -> None:
    ours = layout(0, WINDOW)
    with pytest.raises(DataLoss, match="8 of 40 blocks are missing"):
        check(validator(ours), frames(ours, [Run(0, range(40), Layers(0, 1))]))
