"""The sequences of a worker whose steps vLLM schedules. Lives on the worker's event loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.errors import KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.vllm_engine.engine import Start, StepResult
from kvrelay.vllm_engine.exchange import Exchange, Exchanged
from kvrelay.vllm_engine.nixl.remote_reads import RemoteRead, RemoteReads
from kvrelay.wire.kv_frame import VllmBlocks
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.steps.prompt_rate import PromptRate

log = get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    name: str
    sequence: Sequence
    # vLLM has the sequence.
    given: bool = False
    preemptions: int = 0
    # The KV of the prompt, which has ended, until it is handed over.
    held: VllmBlocks | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the model and of vLLM's steps, in tokens and blocks."""

    max_model_len: int
    eos_token_ids: frozenset[int]
    # Most tokens of a step.
    budget: int
    # vLLM's blocks.
    total_blocks: int


class VllmScheduler:
    """Gives sequences to vLLM and takes them back. vLLM chooses the work of each step.

    On a prefill worker (`leaves`) each prompt first gets staging blocks, in the order of arrival,
    and vLLM computes one token after it. On a decode worker a sequence that joins brings staging
    blocks, which are released once vLLM has loaded them.

    If one worker's vLLM reads from that of another (`reads`), there is no staging memory. A prompt
    that leaves stays in vLLM's blocks, and the blocks of a sequence that joins are only promised:
    they keep room for it in vLLM's memory.
    """

    def __init__(
        self,
        cache: KvCache,
        exchange: Exchange,
        limits: Limits,
        *,
        leaves: bool = False,
        reads: RemoteReads | None = None,
    ) -> None:
        """cache: the staging blocks, or the promised ones."""
        self._reads = reads
        self._cache = cache
        self._exchange = exchange
        self._limits = limits
        self._leaves = leaves
        self._names = count(1)
        # In the order of arrival.
        self._entries: dict[Sequence, _Entry] = {}
        self._by_name: dict[str, _Entry] = {}
        self._aborts: list[str] = []
        # Removed sequences whose staging blocks the running step may use.
        self._leaving: list[Sequence] = []
        self._is_running = False
        self._prompt_tokens = 0
        self.prompt_rate = PromptRate(cache.block_size)
        self.expects_answers = False
        self.preemptions = 0

    def __len__(self) -> int:
        """Number of sequences, running and waiting."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences of which no step has run, oldest first."""
        return tuple(one for one in self._entries if one.started is None)

    @property
    def decodes(self) -> bool:
        """Whether a sequence decodes."""
        return any(one.uncomputed == 1 for one in self._entries)

    def units_awaited(self, priority: int) -> int:
        """The staging blocks to leave free so that sequences with KV in staging, and the waiting
        ones, find room in vLLM's memory.
        """
        size = self._cache.block_size
        promised = sum(-(-len(one.tokens) // size) + 1 for one in self._entries)
        promised += self._cache.pool.num_held
        room = max(0, self._limits.total_blocks - promised)
        return max(0, self._cache.pool.units_available - room)

    def prompt_tokens_per_second(self, answering: float, now: float) -> float | None:
        """The measured rate at which prompts are computed, beside answers if there are any; None
        if unknown.
        """
        return self.prompt_rate.per_second(now)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence whose prompt is computed here."""
        entry = _Entry(f"s{next(self._names)}", sequence)
        self._entries[sequence] = entry
        self._by_name[entry.name] = entry
        # While vLLM has it, `complete` releases its staging blocks.
        sequence.in_flight = False

    def resume(self, sequence: Sequence) -> None:
        """Adds a sequence whose prompt is computed here. vLLM's own blocks have no tiers."""
        self.add(sequence)

    def join(self, sequence: Sequence, now: float) -> None:
        """Adds a sequence whose KV was handed over to its staging blocks, except that of its last
        token.
        """
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence. Its staging blocks are released now, or at the end of the running
        step.
        """
        entry = self._entries.pop(sequence)
        del self._by_name[entry.name]
        sequence.ended = True
        if entry.held is not None:
            self.release(entry.held)
        if entry.given:
            self._aborts.append(entry.name)
        if self._is_running:
            self._leaving.append(sequence)
        else:
            sequence.drop_blocks(self._cache)

    def take_held(self, sequence: Sequence) -> VllmBlocks | None:
        """Returns the KV that vLLM holds of a prompt that has ended. The caller releases it."""
        entry = self._entries[sequence]
        held, entry.held = entry.held, None
        return held

    def release(self, held: VllmBlocks) -> None:
        """Releases blocks of vLLM that nobody will read."""
        self._exchange.released.append(held.request_id)

    # Steps

    def tokens(self) -> int:
        """About how many tokens the next step computes."""
        return min(self._limits.budget, sum(one.uncomputed for one in self._entries))

    def next(self) -> tuple[list[Start], list[str]]:
        """Begins a step: the sequences to start, and the names of those to end before."""
        starts = []
        for entry in self._entries.values():
            if entry.given:
                continue
            if not self._stage(entry.sequence):
                # Later prompts wait too, which prevents starvation.
                break
            entry.given = True
            starts.append(self._start(entry))
        aborts, self._aborts = self._aborts, []
        for name in aborts:
            self._exchange.sequences.pop(name, None)
        self._is_running = True
        return starts, aborts

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._entries or self._aborts)

    @property
    def runs(self) -> bool:
        """Whether vLLM has a sequence."""
        return any(entry.given for entry in self._entries.values())

    def _stage(self, sequence: Sequence) -> bool:
        """Gives a prompt that leaves its staging blocks. Returns False if there are too few."""
        if not self._leaves or self._reads is not None:
            return True
        try:
            sequence.take_blocks(self._cache, len(sequence.tokens))
        except OutOfBlocks:
            return False
        return True

    def _start(self, entry: _Entry) -> Start:
        sequence, staged = entry.sequence, self._reads is None
        read = None if self._reads is None else self._reads.find(sequence.spec.key)
        is_loaded = staged and not self._leaves and sequence.blocks
        self._exchange.sequences[entry.name] = Exchanged(
            sequence,
            self._limits.eos_token_ids,
            arrived_tokens=len(sequence.tokens) - 1 if is_loaded else 0,
            leaves=staged and self._leaves,
            read=read,
        )
        transfer = None if read is None else read.params
        if self._leaves and not staged:
            transfer = {"do_remote_decode": True}
        spec = sequence.spec
        left = min(
            spec.sampling.max_tokens - sequence.num_emitted,
            self._limits.max_model_len - len(sequence.tokens),
        )
        return Start(
            entry.name,
            tuple(sequence.tokens),
            1 if self._leaves else max(1, left),
            spec.salt,
            spec.priority,
            transfer,
        )

    def complete(
        self, result: StepResult, began: float
    ) -> tuple[list[Work], list[list[Sampled]], list[tuple[Work, KvRelayError]]]:
        """Ends a step that began at `began`, in monotonic seconds. Returns the work that it did,
        the tokens of each piece of it, and the pieces that failed.
        """
        self._is_running = False
        for sequence in self._leaving:
            sequence.drop_blocks(self._cache)
        self._leaving.clear()
        self._take_held(result)
        batch: list[Work] = []
        sampled: list[list[Sampled]] = []
        failures: list[tuple[Work, KvRelayError]] = []
        self._prompt_tokens = 0
        for name in {**result.progress, **result.drawn, **result.failed}:
            entry = self._by_name.get(name)
            if entry is None:
                continue
            drawn, failure = result.drawn.get(name), result.failed.get(name)
            work = self._work(entry, result, began, drawn is not None)
            if failure is not None:
                failures.append((work, failure))
            elif work.num_tokens or drawn is not None:
                batch.append(work)
                sampled.append([] if drawn is None else [drawn])
        return batch, sampled, failures

    def _take_held(self, result: StepResult) -> None:
        """Notes the blocks that vLLM holds, and the reads that run."""
        for name, held in result.held.items():
            if (entry := self._by_name.get(name)) is None:
                self.release(held)
            else:
                entry.held = held
        for name in result.reading:
            read = self._read(self._by_name.get(name))
            if read is not None:
                read.running = True

    def _read(self, entry: _Entry | None) -> RemoteRead | None:
        if entry is None or self._reads is None:
            return None
        return self._reads.find(entry.sequence.spec.key)

    def _end_read(self, entry: _Entry) -> None:
        """The sequence has KV, from a read or from vLLM's computation."""
        if self._reads is None or (read := self._read(entry)) is None:
            return
        key = entry.sequence.spec.key
        if read.failed:
            log.warning("kv_read_failed", request=key[0], engine=read.blocks.engine_id)
        self._reads.finish(key, 0 if read.failed else -(-read.tokens // self._cache.block_size))

    def _work(self, entry: _Entry, result: StepResult, began: float, drawn: bool) -> Work:
        sequence, before = entry.sequence, entry.sequence.num_computed
        computed, preemptions = result.progress.get(
            entry.name, (len(sequence.tokens), entry.preemptions)
        )
        # A sequence with a token has KV of all tokens before it.
        computed = len(sequence.tokens) if drawn else min(computed, len(sequence.tokens) - 1)
        self.preemptions += max(0, preemptions - entry.preemptions)
        entry.preemptions = preemptions
        exchanged = self._exchange.sequences[entry.name]
        cached = result.cached.get(entry.name, 0)
        if computed and sequence.started is None:
            sequence.started = began
            sequence.cached_tokens = min(cached, len(sequence.tokens) - 1)
        if not self._leaves and sequence.blocks and computed:
            # Loaded, or found in vLLM's prefix cache.
            exchanged.arrived_tokens = 0
            sequence.drop_blocks(self._cache)
            self._end_read(entry)
        new = max(0, computed - before)
        if new > 1:
            self._prompt_tokens += new - (sequence.cached_tokens if not before else 0)
        sequence.chunks += 1
        sequence.num_computed = computed
        return Work(sequence, new, drawn)

    def ran(self, seconds: float, now: float) -> None:
        """Takes in the time that the step took, in seconds, at its end."""
        self.prompt_rate.add(self._prompt_tokens, seconds, now)

    def abandon(self) -> None:
        """Ends a step that does not run after all."""
        self._is_running = False
