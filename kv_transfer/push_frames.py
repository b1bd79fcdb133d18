"""The frames of a push: queues blocks as they are computed and packs them for a transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.blocks.plan import Layers, Places
from kv_transfer.transports import Outbound
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvCommit, VllmBlocks, commit_digest, frame_to_bytes


class Run(NamedTuple):
    """Some layers of blocks of the sender's arena, which are the sequence's blocks `first`, `first`
    + 1, ...
    """

    first: int
    blocks: Sequence[int]
    layers: Layers

    def split(self, size: int) -> Iterator[Run]:
        """Yields runs of at most `size` blocks."""
        for start in range(0, len(self.blocks), size):
            yield Run(self.first + start, self.blocks[start : start + size], self.layers)


class PushFrames:
    """The queue of one push. Each attempt of the push packs it from its first run.

    `wake` ends a wait for the next run, so that `packed` notices that it must stop.
    """

    def __init__(self, layout: KvLayout) -> None:
        # Set once the peer may have the frame.
        self.commit_frame: KvCommit | None = None
        # Number of queued blocks, and the place after the last.
        self.num_blocks = 0
        self._end = 0
        self._layout = layout
        self._runs: list[Run] = []
        # First token, number of tokens, and the KV that stays in vLLM.
        self._ending: tuple[int, int, VllmBlocks | None] | None = None
        self._changed = asyncio.Event()
        self._packer: FramePacker | None = None

    @property
    def num_bytes(self) -> int:
        """KV bytes that the current or last attempt has packed."""
        return 0 if self._packer is None else self._packer.num_bytes

    def add(self, run: Run) -> None:
        """Queues a run. The blocks of a run follow those of the earlier ones, or are their last
        blocks in further layers.
        """
        assert self._ending is None, "no blocks after the commit"
        self._runs.append(run)
        end = run.first + len(run.blocks)
        self.num_blocks += max(0, end - max(self._end, run.first))
        self._end = max(self._end, end)
        self.wake()

    def end(self, first_token: int, num_tokens: int, in_vllm: VllmBlocks | None = None) -> None:
        """Queues the commit."""
        assert self._ending is None, "a push is committed once"
        self._ending = first_token, num_tokens, in_vllm
        self.wake()

    def wake(self) -> None:
        """Makes `packed` check its state again."""
        self._changed.set()

    async def packed(
        self, outbound: Outbound, stopped: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """Yields all frames up to the commit, or until `stopped` returns True. Waits for runs."""
        packer = self._packer = FramePacker(outbound, self._layout)
        next_run = 0
        while not stopped():
            if next_run < len(self._runs):
                for run in self._runs[next_run].split(
                    packer.blocks_per_frame(self._runs[next_run])
                ):
                    if not stopped():
                        yield await in_thread(packer.pack, run)
                next_run += 1
            elif self._ending is None:
                self._changed.clear()
                await self._changed.wait()
            else:
                self.commit_frame = packer.commit(*self._ending)
                yield frame_to_bytes(self.commit_frame)
                return


class FramePacker:
    """Packs the frames of one attempt, and computes the digest for its commit."""

    def __init__(self, outbound: Outbound, layout: KvLayout) -> None:
        # KV bytes in frames.
        self.num_bytes = 0
        self._outbound = outbound
        self._layout = layout
        self._frames = 0
        self._digest = xxhash.xxh3_64()

    def blocks_per_frame(self, run: Run) -> int:
        """Number of the run's blocks that fit into a frame; at least 1."""
        return max(1, self._outbound.frame_bytes // self._block_bytes(run.layers))

    def pack(self, run: Run) -> bytes:
        """The next frame, encoded. Slow, for a worker thread."""
        num_bytes = len(run.blocks) * self._block_bytes(run.layers)
        header = KvBlocks(
            self._frames, run.first, len(run.blocks), run.layers.first, run.layers.num, num_bytes
        )
        frame = self._outbound.pack(header, run.blocks)
        for digest in frame.digests:
            self._digest.update(digest.to_bytes(8, "little"))
        self._frames += 1
        self.num_bytes += num_bytes
        return frame_to_bytes(frame)

    def commit(
        self, first_token: int, num_tokens: int, in_vllm: VllmBlocks | None = None
    ) -> KvCommit:
        """The commit of the frames packed so far."""
        digest = commit_digest(self._digest, first_token, num_tokens, in_vllm)
        return KvCommit(self._frames, digest, first_token, num_tokens, in_vllm)

    def _block_bytes(self, layers: Layers) -> int:
        return Places.of_payload(self._layout, 1, layers).block_bytes
