"""A model whose every output depends on every KV byte before it.

The KV of a token is a hash of all KV before it and of the token; the next token is a hash of all KV
and of what the sampler is given. Both read the KV from the blocks, through the block table: one
byte that is wrong, stale, foreign or missing changes all that follows. `answer` says what comes out
where nothing goes wrong. Another version of the model, which differs in its weights alone, gives
other tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
import xxhash
from support.no_adapters import NoAdapters
from support.no_grammars import NoGrammars

from kvrelay.engine.sampling.sampler import Sampled, SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.types.requests import SamplingParams

VOCAB = 40
EOS = 0
POISON = VOCAB - 1  # a prompt with it kills who computes it; never drawn
BLOCK = 4  # tokens
LAYOUT = KvLayout((LayerKv(1, 2, 2), LayerKv(1, 2, 2)), block_size=BLOCK, dtype="float32")
MODEL = "toy"
FIRST_MODEL = f"{MODEL}-0"  # the id of the version that a cluster begins with
MAX_MODEL_LEN = 96
TOKEN_BYTES = LAYOUT.block_bytes // BLOCK
assert TOKEN_BYTES == 32, "as many as two 128-bit digests have"


def _kv(state: bytes, token: int, version: int) -> bytes:
    material = state + token.to_bytes(4, "little")
    seed = 2 * version + 1
    return xxhash.xxh3_128_digest(material, seed) + xxhash.xxh3_128_digest(material, seed + 1)


def _draw(state: bytes, seen: Sequence[int], prompt_len: int, params: SamplingParams) -> int:
    words = array("q", [params.seed or 0, prompt_len, *seen])
    return xxhash.xxh3_64_intdigest(state + words.tobytes()) % POISON


@lru_cache(maxsize=4096)
def answer(prompt: tuple[int, ...], params: SamplingParams, version: int = 0) -> tuple[int, ...]:
    """What a model gives that nothing happens to, up to its end or max_tokens."""
    kv = xxhash.xxh3_64()
    tokens = list(prompt)
    for token in prompt:
        kv.update(_kv(kv.digest(), token, version))
    while True:
        tokens.append(_draw(kv.digest(), tokens, len(prompt), params))
        ended = tokens[-1] == EOS and not params.ignore_eos
        if ended or len(tokens) - len(prompt) >= params.max_tokens or len(tokens) >= MAX_MODEL_LEN:
            return tuple(tokens[len(prompt) :])
        kv.update(_kv(kv.digest(), tokens[-1], version))


class Arena:
    """kv_transfer.blocks.arena.Arena in plain memory, which holds rubbish at first."""

    fd = 0  # named in frames, never opened

    def __init__(self, num_blocks: int, nonce: int) -> None:
        self.layout = LAYOUT
        self.num_blocks = num_blocks
        self.nonce = nonce
        memory = np.full(LAYOUT.arena_bytes(num_blocks), 0xAA, dtype=np.uint8)
        self.buffer = torch.from_numpy(memory)
        self.shares = (self.buffer,)
        ends = list(accumulate(num_blocks * size for size in LAYOUT.region_block_bytes))
        self.regions = [
            region.reshape(num_blocks * BLOCK, -1) for region in np.split(memory, ends[:-1])
        ]


class ToyRunner:
    """Stands for kvrelay.engine.runner.ModelRunner. `die` is called by a poisoned prompt, and kills
    the process; `look` is called before each step.
    """

    layout = LAYOUT
    sampled_model_id = MODEL  # of all versions: they differ in bytes that are not sampled
    tokenizer_id = MODEL
    max_model_len = MAX_MODEL_LEN
    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB
    engine = "toy"
    weight_bytes = 0
    without_kernels = not_captured = ""
    rank_pids = ()
    warmup = windows = None
    adapters = NoAdapters()
    grammars = NoGrammars()

    def __init__(
        self,
        num_blocks: int,
        nonce: int,
        die: Callable[[], None],
        look: Callable[[], None] = lambda: None,
        version: int = 0,
    ) -> None:
        self.version = version
        self.model_id = f"{MODEL}-{version}"
        self.layout_hash = self.stored_layout = LAYOUT.hash(self.model_id)
        self.kv = Arena(num_blocks, nonce)
        self.num_blocks = num_blocks
        self.kv_bytes = LAYOUT.arena_bytes(num_blocks)
        self.steps = 0
        self._die = die
        self._look = look

    def close(self) -> None:
        pass

    def lost(self) -> str:
        return ""

    def kill_ranks(self) -> None:
        pass

    def run(
        self, segments: Sequence[Segment], on_layer: Callable[[int], None] | None = None
    ) -> list[list[Sampled]]:
        self.steps += 1
        self._look()
        if any(POISON in segment.token_ids for segment in segments):
            self._die()
        sampled = [self._segment(segment) for segment in segments]
        for layer in range(len(LAYOUT.layers)):
            if on_layer is not None:
                on_layer(layer)
        return sampled

    def _segment(self, segment: Segment) -> list[Sampled]:
        kv = xxhash.xxh3_64(self._read(segment.blocks, segment.start))
        written: list[bytes] = []
        states: list[bytes] = []
        for token in segment.token_ids:
            written.append(_kv(kv.digest(), token, self.version))
            kv.update(written[-1])
            states.append(kv.digest())
        self._write(segment, b"".join(written))
        draws = segment.draws
        after = states[len(states) - len(draws) :]
        sampled = [
            Sampled(_draw_for(request, state)) for request, state in zip(draws, after, strict=True)
        ]
        return segment.accepted(sampled) if segment.num_draft else sampled

    def _read(self, blocks: Sequence[int], end: int) -> bytes:
        if end == 0:
            return b""
        slots = _slots(blocks, 0, end)
        return np.concatenate([region[slots] for region in self.kv.regions], axis=1).tobytes()

    def _write(self, segment: Segment, kv: bytes) -> None:
        count = len(segment.token_ids)
        slots = _slots(segment.blocks, segment.start, segment.start + count)
        table = np.frombuffer(kv, dtype=np.uint8).reshape(count, TOKEN_BYTES)
        start = 0
        for region in self.kv.regions:
            region[slots] = table[:, start : start + region.shape[1]]
            start += region.shape[1]


def _slots(blocks: Sequence[int], start: int, end: int) -> np.ndarray:
    positions = np.arange(start, end)
    return np.asarray(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


def _draw_for(request: SampleRequest, state: bytes) -> int:
    return _draw(state, list(request.token_ids), request.prompt_len, request.params)
