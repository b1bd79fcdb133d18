"""vLLM's engine in the worker's process: its steps, and what they did for each sequence."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_pool import IntegrityError
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.errors import Internal, InvalidArgument, KvRelayError, ModelRefused
from kvrelay.types.workers import PoolName
from kvrelay.vllm_engine.arguments import NIXL_CONNECTOR
from kvrelay.vllm_engine.cache_events import CacheEvents
from kvrelay.vllm_engine.cached_blocks import CacheChanges, CachedBlocks
from kvrelay.vllm_engine.engine_config import engine_config, reason
from kvrelay.vllm_engine.exchange import EXCHANGE, KEY
from kvrelay.vllm_engine.version_check import check_version
from kvrelay.wire.kv_frame import VllmBlocks
from kvrelay.worker.stage import BlockCounts

# vLLM's status of a request whose KV it reads.
_READING = "WAITING_FOR_REMOTE_KVS"
# Most steps of the warm-up.
_WARMUP_STEPS = 64


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence to run: its name, tokens, and how many tokens follow at most."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int
    salt: str = ""
    priority: int = 0
    # vLLM's kv_transfer_params; None without a hand-off by vLLM.
    transfer: dict[str, Any] | None = None


@dataclass(slots=True)
class StepResult:
    """What a step did, by the names of the sequences."""

    # Tokens with KV, and preemptions so far, of each sequence that is still in vLLM.
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    drawn: dict[str, Sampled] = field(default_factory=dict)
    failed: dict[str, KvRelayError] = field(default_factory=dict)
    # Prompt tokens that vLLM's prefix cache held.
    cached: dict[str, int] = field(default_factory=dict)
    # What the step changed in vLLM's prefix cache.
    cache: CacheChanges = field(default_factory=CacheChanges)
    # Prompts that have ended and whose blocks vLLM holds, for another worker's vLLM to read.
    held: dict[str, VllmBlocks] = field(default_factory=dict)
    # Sequences whose KV is being read. They make no progress.
    reading: set[str] = field(default_factory=set)


class VllmEngine:
    """vLLM's LLMEngine, owned by one thread; calls do not overlap."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.version = check_version()
        self.config = engine.vllm_config
        core = engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self.kv_cache_config = core.scheduler.kv_cache_config
        connector = engine.vllm_config.kv_transfer_config
        # Whether other workers' vLLM reads from this one, or this one from others.
        self._exchanges = connector is not None and connector.kv_connector == NIXL_CONNECTOR
        # None without a prefix cache, and for models with several kinds of blocks.
        self._cache_events: CacheEvents | None = None
        pool = core.scheduler.kv_cache_manager.block_pool
        if pool.enable_kv_cache_events and len(self.kv_cache_config.kv_cache_groups) == 1:
            self._cache_events = CacheEvents(core.scheduler, self.config.cache_config.block_size)

    @classmethod
    def load(cls, config: ClusterConfig, pool: PoolName, model_path: str) -> VllmEngine:
        """Starts an engine in this process, which can have only one. Raises what `engine_config`
        raises, and ModelRefused for a model.
        """
        built = engine_config(config, pool, model_path)
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            make = partial(LLMEngine.from_vllm_config, built, disable_log_stats=True)
            return cls(make())
        except Exception as error:
            raise ModelRefused(
                f"{model_path}: vLLM cannot run it: {reason(error)}; choose another model, or "
                "change model or engine_args if the reason names a value of them"
            ) from error

    @property
    def model_path(self) -> str:
        """The folder of the model."""
        return str(self.config.model_config.model)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.config.model_config.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.config.model_config.get_vocab_size())

    @property
    def budget(self) -> int:
        """Most tokens of a step."""
        return int(self.config.scheduler_config.max_num_batched_tokens)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer, from the generation config if it has them, else from the
        model's. Raises ModelRefused.
        """
        model = self.config.model_config
        for ids in (
            model.try_get_generation_config().get("eos_token_id"),
            getattr(model.hf_text_config, "eos_token_id", None),
        ):
            if ids is not None:
                found = ids if isinstance(ids, list) else [ids]
                if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in found):
                    raise ModelRefused(
                        f"eos_token_id {ids!r:.100} is neither a token id nor a list of token ids"
                    )
                return frozenset(found)
        return frozenset()

    @property
    def blocks(self) -> BlockCounts:
        """vLLM's own count of its blocks. Block 0 is a placeholder and never used."""
        pool = self._scheduler.kv_cache_manager.block_pool
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        cached = max(0, len(pool.cached_block_hash_to_block) - (total - free))
        return BlockCounts(total, total - free, min(free, cached))

    @property
    def num_requests(self) -> int:
        """Requests that vLLM has not finished."""
        return int(self._engine.get_num_unfinished_requests())

    @property
    def is_unsettled(self) -> bool:
        """Whether steps are needed although no sequence runs: vLLM has to tell another worker's
        vLLM something, or to hear from it.
        """
        return self._exchanges and bool(self._scheduler.has_requests())

    def check_blocks(self, num_sequences: int) -> None:
        """Raises IntegrityError if vLLM holds blocks although the worker has no sequence."""
        held = self.blocks.held
        # Requests that have ended keep their blocks while another worker's vLLM may read them.
        if held and not num_sequences and not self.num_requests and not self._scheduler.requests:
            raise IntegrityError(f"vLLM holds {held} blocks without a sequence")

    def cached_blocks(self, cache: KvCache) -> CachedBlocks | None:
        """Returns an empty index of vLLM's prefix cache, which follows the changes that steps
        report; None if they report none, or have blocks of another size than routers expect.
        `cache` hashes for routers.
        """
        if self._cache_events is None or self.config.cache_config.block_size != cache.block_size:
            return None
        return CachedBlocks(self.blocks.total, cache.hasher)

    @property
    def keeps_state(self) -> bool:
        """Whether layers keep a state of each sequence, like those of state-space models."""
        return bool(self.config.model_config.has_inner_state)

    @property
    def warmup_tokens(self) -> int:
        """Tokens of a prompt that shows whether vLLM has the kernels of the model. vLLM stores the
        state of a prompt at the ends of blocks, by kernels that a shorter prompt does not need.
        """
        wanted = 2 * self.config.cache_config.block_size + 1 if self.keeps_state else 32
        return min(wanted, self.max_model_len - 2)

    def warm_up(self, tokens: Sequence[int]) -> None:
        """Runs a request of vLLM's own, so that no other waits for kernels to compile."""
        self._add(Start("", tuple(tokens), 2))
        for _ in range(_WARMUP_STEPS):
            if not self.num_requests:
                return
            self._engine.step()
        raise Internal(f"vLLM did not finish its first request in {_WARMUP_STEPS} steps")

    def step(self, starts: Iterable[Start], aborts: Sequence[str]) -> StepResult:
        """Ends and starts sequences, then runs one step if any is left. The KV of a sequence that
        was ended is neither read nor written from then on.

        Raises what vLLM raises; the engine is then in an unknown state.
        """
        result = StepResult()
        if aborts:
            self._engine.abort_request(list(aborts))
        for start in starts:
            try:
                self._add(start)
            # Nothing has run yet: this is about the request.
            except Exception as error:  # noqa: BLE001
                result.failed[start.name] = InvalidArgument(
                    f"vLLM refuses the request: {reason(error)}"
                )
        for output in self._engine.step() if self.num_requests or self.is_unsettled else ():
            self._take(output, result)
        self._follow(result)
        if self._cache_events is not None:
            result.cache = self._cache_events.changes()
        return result

    def _follow(self, result: StepResult) -> None:
        """Adds the progress of the sequences that are still in vLLM."""
        for request in self._scheduler.requests.values():
            name = (request.sampling_params.extra_args or {}).get(KEY)
            if name is None or request.is_finished():
                continue
            if request.status.name == _READING:
                result.reading.add(name)
            else:
                result.progress[name] = request.num_computed_tokens, request.num_preemptions

    def _take(self, output: Any, result: StepResult) -> None:
        name, (answer,) = output.request_id, output.outputs
        if output.kv_transfer_params:
            result.held[name] = _held(output.kv_transfer_params)
        one = EXCHANGE.sequences.get(name)
        if one is None:
            return
        if output.num_cached_tokens:
            result.cached[name] = output.num_cached_tokens
        drawn, one.drawn = one.drawn, None
        if isinstance(drawn, KvRelayError):
            result.failed[name] = drawn
        elif drawn is not None and list(answer.token_ids) == [drawn.token_id]:
            result.drawn[name] = drawn
        elif answer.token_ids or output.finished:
            text = f"vLLM ended the sequence with {answer.finish_reason!r:.40}"
            result.failed[name] = Internal(text)

    def _add(self, start: Start) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            # KeyedSampler draws.
            temperature=0.0,
            max_tokens=start.max_tokens,
            # The worker ends answers.
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=_extra_args(start),
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(start.token_ids)}
        if start.salt:
            prompt["cache_salt"] = start.salt
        self._engine.add_request(start.name or "warm-up", prompt, params, priority=start.priority)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.engine_core.shutdown()


def _extra_args(start: Start) -> dict[str, Any] | None:
    if not start.name:
        return None
    # vLLM changes the parameters.
    transfer = {} if start.transfer is None else {"kv_transfer_params": dict(start.transfer)}
    return {KEY: start.name, **transfer}


def _held(params: dict[str, Any]) -> VllmBlocks:
    """The blocks that vLLM holds for a read, from what it says of a prompt that has ended."""
    (blocks,) = params["remote_block_ids"]
    expires_at = float(params["remote_blocks_expiry_time"])
    return VllmBlocks(
        engine_id=params["remote_engine_id"],
        request_id=params["remote_request_id"],
        host=params["remote_host"],
        port=params["remote_port"],
        blocks=tuple(blocks),
        expires_at=expires_at,
        held_s=expires_at - time.perf_counter(),
    )
