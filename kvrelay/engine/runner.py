"""Runs a model: one ragged forward pass per step over paged KV, then sampling."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice
from typing import Literal

import torch

from kvrelay.engine.attention.flashinfer_attention import DoesNotFit
from kvrelay.engine.base.device import find_device
from kvrelay.engine.base.kv_memory import TORCH_DTYPE, KvPool
from kvrelay.engine.base.step_input import OnLayer, Part, Step
from kvrelay.engine.forward.cuda_forward import SCRATCH_BLOCKS, CudaForward
from kvrelay.engine.forward.native_forward import NativeForward
from kvrelay.engine.forward.torch_forward import TorchForward
from kvrelay.engine.kernel_choice import why_without_kernels
from kvrelay.engine.kvcache.kv_cache import WindowRule
from kvrelay.engine.model.adapter_table import AdapterTable
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.engine.model.kernel_modules import use_kernels
from kvrelay.engine.model.loader import LoadedModel, load_model, weight_bytes
from kvrelay.engine.native.ops import set_threads
from kvrelay.engine.parallel.forward import RanksForward
from kvrelay.engine.parallel.group import RankGroup
from kvrelay.engine.parallel.plan import check_degree
from kvrelay.engine.parallel.settings import RankSettings
from kvrelay.engine.sampling.compiled_grammars import Grammars
from kvrelay.engine.sampling.sampler import Sampled, SampleRequest, sample, score
from kvrelay.engine.sampling.sequence_faults import SegmentsFailed, SequenceFault
from kvrelay.engine.sequence_segment import Segment
from kvrelay.engine.token_eviction.evictor import TokenEvictor
from kvrelay.engine.token_eviction.methods import token_evictor
from kvrelay.errors import ConfigError, InvalidArgument, KvRelayError, ModelRefused
from kvrelay.types.kv_layout import KvLayout, check_dtype
from kvrelay.types.requests import SamplingParams
from kvrelay.types.token_eviction import WHY_NOT_WITH_WINDOWS, EvictionMethod

# (model, layout, tokens of the longest sequence) -> bytes for KV of all ranks.
ChooseKvBytes = Callable[[LoadedModel, KvLayout, int], int]
# Sampling that takes the most memory.
_WIDEST = SamplingParams(temperature=1.0, top_p=0.9, seed=0)


class ModelRunner:
    """One model and its KV memory. Owned by one thread; calls do not overlap."""

    def __init__(
        self,
        loaded: LoadedModel,
        layout: KvLayout,
        kv: KvPool,
        max_model_len: int,
        *,
        without_kernels: str = "no kernels were asked for",
        weights: Literal["auto", "int8"] = "auto",
        flashinfer: bool = False,
        group: RankGroup | None = None,
        adapter_slots: int = 0,
        eviction: EvictionMethod | None = None,
        kv_bytes: int | None = None,
        windows: WindowRule | None = None,
    ) -> None:
        """Selects the forward pass. With a group, `loaded` is this rank's share. kv_bytes: the
        memory that KV may take, if that is less than the pool maps.
        """
        self.layout = layout
        self.kv = kv
        self.num_blocks = kv.num_blocks
        self.model_id = loaded.model_id
        self.sampled_model_id = loaded.sampled_model_id
        self.tokenizer_id = loaded.tokenizer_id
        self.layout_hash = layout.hash(loaded.model_id)
        self.max_model_len = max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size = loaded.vocab_size
        self.grammars = Grammars(loaded.folder, loaded.vocab_size, loaded.eos_token_ids)
        self.weight_bytes = weight_bytes(loaded.model)
        self.kv_bytes = layout.arena_bytes(kv.num_blocks) if kv_bytes is None else kv_bytes
        # True if a layer attends to fewer tokens than the longest sequence has.
        self.windowed = any(0 < window < max_model_len for window in loaded.windows)
        # Which blocks need their windowed parts; None if blocks have all parts.
        self.windows = windows
        self.kernels = "torch" if without_kernels else "native"
        # The reason why kernels are not used, or empty.
        self.without_kernels = without_kernels
        # The dtype of the weights as they are computed with.
        self._weights = (
            "int8" if weights == "int8" else str(loaded.model.dtype).removeprefix("torch.")
        )
        # The reason why steps are not captured, or empty.
        self.not_captured = ""
        # Tokens and seconds of a step that ran before the worker's first step.
        self.warmup: tuple[int, float] | None = None
        self._group = group
        self.adapters = AdapterTable(
            loaded,
            adapter_slots,
            native=not without_kernels,
            refused=_why_without_adapters(loaded, group),
        )
        self._forward: CudaForward | TorchForward | NativeForward | RanksForward
        if group is not None:
            self._forward = RanksForward(loaded.model, kv, group)
        elif flashinfer:
            self._forward = _on_gpu(loaded, kv, max_model_len)
            self.num_blocks -= SCRATCH_BLOCKS
            self.without_kernels, self.kernels = "", "flashinfer"
        elif without_kernels:
            self._forward = TorchForward(loaded.model, kv, self.adapters.step)
        else:
            # The only method that needs queries while sequences decode.
            watched = eviction == "attention"
            self._forward = NativeForward(loaded.model, kv, self.adapters.step, watched=watched)
            self.not_captured = self._forward.not_captured
        # Drops tokens of sequences; None without eviction.
        self.evictor: TokenEvictor | None = (
            None
            if eviction is None
            else token_evictor(eviction, loaded, kv, max_model_len, self.forward)
        )

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "auto",
        block_size: int = 32,
        kv_dtype: Literal["auto", "int8", "int4"] = "auto",
        kv_bytes: int | ChooseKvBytes,
        max_model_len: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
        weights: Literal["auto", "int8"] = "auto",
        kernels: Literal["auto", "torch"] = "auto",
        group: RankGroup | None = None,
        adapter_slots: int = 0,
        latents: bool = True,
        eviction: EvictionMethod | None = None,
        step_tokens: int | None = None,
    ) -> ModelRunner:
        """Loads the model onto `device`, then continues as `of`. `threads` is set for the whole
        process. latents: as in `load_model`.

        With a group its ranks share the model, each with the same number of threads, and end with
        the runner. Raises ModelRefused, and ConfigError if there is no such device.
        """
        find_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        if group is not None:
            if weights == "int8":
                raise ConfigError(
                    "weights: int8 needs the native kernels, which tensor_parallel does not run; "
                    "set weights: auto or tensor_parallel: 1"
                )
            checkpoint = find_checkpoint(path)
            check_degree(checkpoint, group.degree)
            folder = str(checkpoint.folder)
            group.begin(
                RankSettings(folder, dtype, device, torch.get_num_threads(), block_size, kv_dtype)
            )
        ranks = 1 if group is None else group.degree
        return cls.of(
            load_model(path, dtype=dtype, device=device, ranks=ranks, latents=latents),
            block_size=block_size,
            kv_dtype=kv_dtype,
            kv_bytes=kv_bytes,
            max_model_len=max_model_len,
            weights=weights,
            kernels=kernels,
            group=group,
            adapter_slots=adapter_slots,
            eviction=eviction,
            step_tokens=step_tokens,
        )

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        *,
        block_size: int = 32,
        kv_dtype: Literal["auto", "int8", "int4"] = "auto",
        kv_bytes: int | ChooseKvBytes,
        max_model_len: int | None = None,
        weights: Literal["auto", "int8"] = "auto",
        kernels: Literal["auto", "torch"] = "auto",
        group: RankGroup | None = None,
        adapter_slots: int = 0,
        eviction: EvictionMethod | None = None,
        step_tokens: int | None = None,
    ) -> ModelRunner:
        """Allocates up to `kv_bytes` for KV on the model's device. A function chooses the bytes
        when the model is loaded, and may raise ConfigError.

        - kv_dtype: auto is the dtype that the model attends in.
        - weights: auto is the dtype that they have.
        - kernels: auto is the native kernels on a CPU if they compile and fit the model, and
          torch's operators if not; `without_kernels` then gives the reason. On a GPU, auto is
          flashinfer, or torch's operators for ranks that share the model.
        - max_model_len: limited to what the model allows.
        - adapter_slots: most adapters at a time; see `adapters`.
        - eviction: how `evictor` chooses tokens; None for no evictor.
        - step_tokens: the most new tokens of a sequence in a step, if blocks need the KV of sliding
          windows only as long as `windows` says; None keeps it.

        Raises ModelRefused if flashinfer does not fit the model. Raises ConfigError if `kv_bytes`
        does not hold one sequence of max_model_len tokens or is not free, if int8 weights have no
        kernels, if int4 cannot hold the heads, or if the model cannot be served with the eviction.
        """
        longest = min(max_model_len or loaded.max_model_len, loaded.max_model_len)
        if eviction is not None and (obstacle := _why_without_eviction(loaded, group)):
            raise ConfigError(f"kv.eviction: {obstacle}")
        layout = loaded.layout(
            block_size, kv_dtype, longest=longest, windows=step_tokens is not None
        )
        check_dtype(layout.dtype, layout.layers)
        wanted = kernels == "auto"
        reason = (
            why_without_kernels(loaded, layout) if wanted else "the torch kernels were requested"
        )
        if reason and weights == "int8":
            raise ConfigError(
                f"weights: int8 needs the native kernels: {reason}; set weights: auto"
            )
        if not reason:
            set_threads(torch.get_num_threads())
            use_kernels(loaded.model, int8_weights=weights == "int8")
            layout = replace(layout, word=4 // TORCH_DTYPE[loaded.kv_dtype].itemsize)
        if not isinstance(kv_bytes, int):
            kv_bytes = kv_bytes(loaded, layout, longest)
        _check_memory(layout, kv_bytes, longest, step_tokens or 0)
        device = loaded.model.device
        windows = WindowRule(layout, step_tokens or 0) if layout.windows else None
        num_blocks = layout.num_blocks_in(kv_bytes)
        flashinfer = device.type == "cuda" and group is None and wanted
        if flashinfer:
            num_blocks += SCRATCH_BLOCKS
        try:
            pool = KvPool(layout, num_blocks, str(device))
            if group is not None:
                group.share(pool)
            return cls(
                loaded,
                layout,
                pool,
                longest,
                without_kernels=reason,
                weights=weights,
                flashinfer=flashinfer,
                group=group,
                adapter_slots=adapter_slots,
                eviction=eviction,
                kv_bytes=kv_bytes if windows else None,
                windows=windows,
            )
        except torch.OutOfMemoryError as error:
            raise _too_little_memory(kv_bytes, device, error) from error

    @property
    def stored_layout(self) -> str:
        """Names the KV that may come back from files, 16 hexadecimal digits: as `layout_hash`, and
        the dtype of the weights that computed it.
        """
        text = f"{self.layout_hash}|{self._weights}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def engine(self) -> str:
        """Describes the kernels and dtypes, for operators."""
        return f"{self.kernels} kernels, weights {self._weights}, KV {self.layout.dtype}"

    def capture_decode_steps(self, most: int, seconds: float) -> None:
        """Prepares decode steps of 1 to `most` sequences before there are any, for at most about
        `seconds`; on a GPU, as long as that takes. Without native kernels or a GPU, does nothing.
        No block may be in use.
        """
        if isinstance(self._forward, NativeForward):
            self._forward.capture_decode_steps(most, seconds)
        elif isinstance(self._forward, CudaForward):
            self._forward.capture_decode_steps(most)
            self.not_captured = self._forward.not_captured

    def try_largest_step(self, tokens: int, sequences: int) -> None:
        """On a GPU, runs a step of `sequences` sequences, one of which has `tokens` new tokens and
        each other has one, while no block is in use. torch keeps the memory that this takes.

        Raises ConfigError if the memory is missing.
        """
        if not isinstance(self._forward, CudaForward):
            return
        tokens = min(tokens, self.max_model_len, self.num_blocks * self.layout.block_size)
        blocks = range(self.num_blocks)
        segments = [
            Segment([0] * new, 0, blocks, sample=SampleRequest(_WIDEST, [0] * new, new))
            for new in (tokens, *[1] * (sequences - 1))
        ]
        try:
            # If a sequence has no token, user requests will show the fault.
            with suppress(SegmentsFailed):
                self.run(segments)
        except torch.OutOfMemoryError as error:
            raise _too_little_memory(self.kv_bytes, self.kv.buffer.device, error) from error

    @torch.inference_mode()
    def run(
        self, segments: Sequence[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        """Runs one forward pass over all segments; returns the sampled tokens of each segment.

        A segment without `sample` has none, a segment with `sample` has one, and a segment with
        drafts has up to num_draft + 1.

        Raises SegmentsFailed, with the outcome of each segment, if some failed: with
        InvalidArgument for tokens, positions or blocks out of range, which are not computed, or
        with the errors that `sample` returns.
        """
        outcomes: list[list[Sampled] | KvRelayError] = [
            self._flaw(segment) or [] for segment in segments
        ]
        places = [
            place for place, outcome in enumerate(outcomes) if not isinstance(outcome, KvRelayError)
        ]
        if places:
            good = [segments[place] for place in places]
            for place, outcome in zip(places, self._run(good, on_layer), strict=True):
                outcomes[place] = outcome
        sampled = [outcome for outcome in outcomes if not isinstance(outcome, KvRelayError)]
        if len(sampled) < len(segments):
            raise SegmentsFailed(outcomes)
        return sampled

    def _run(
        self, segments: Sequence[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled] | KvRelayError]:
        ends = list(accumulate(len(segment.token_ids) for segment in segments))
        draws = [segment.draws for segment in segments]
        drawn = [
            row for end, own in zip(ends, draws, strict=True) for row in range(end - len(own), end)
        ]
        scored = [
            end - len(segment.token_ids) + row - segment.start
            for end, segment in zip(ends, segments, strict=True)
            for row in segment.scored
        ]
        logits = self._logits(segments, drawn + scored, on_layer)
        faults = _score(segments, logits[len(drawn) :]) if scored else {}
        requests = [request for own in draws for request in own]
        sampled = iter(sample(logits[: len(drawn)], requests))
        outcomes = [
            segment.accepted(list(islice(sampled, len(own))))
            for segment, own in zip(segments, draws, strict=True)
        ]
        return [faults.get(place, outcome) for place, outcome in enumerate(outcomes)]

    @torch.inference_mode()
    def forward(
        self, segments: Sequence[Segment], rows: Sequence[int], on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Logits [len(rows), vocab_size] after some of the new tokens; `rows` count the new tokens
        of all segments.

        Stores the KV of all new tokens. Raises InvalidArgument, before any computation, for tokens,
        positions or blocks out of range.
        """
        for segment in segments:
            if flaw := self._flaw(segment):
                raise flaw
        return self._logits(segments, rows, on_layer)

    def _logits(
        self, segments: Sequence[Segment], rows: Sequence[int], on_layer: OnLayer | None
    ) -> torch.Tensor:
        token_ids: list[int] = []
        parts = []
        for segment in segments:
            row, new = len(token_ids), len(segment.token_ids)
            slot = self.adapters.slot(segment.adapter) if segment.adapter else None
            parts.append(
                Part(row, new, segment.past, segment.blocks, slot, segment.dropped, segment.queries)
            )
            token_ids += segment.token_ids
        return self._forward(Step(token_ids, parts, rows, on_layer))

    def lost(self) -> str:
        """The reason why no step can run any more; empty while steps can run. Safe to call from any
        thread.
        """
        return "" if self._group is None else self._group.lost()

    @property
    def rank_pids(self) -> Sequence[int]:
        """Process ids of the other ranks."""
        return () if self._group is None else self._group.pids

    def kill_ranks(self) -> None:
        """Kills the other ranks. Call it when a step does not return: this process can then only
        end, and the ranks must end with it.
        """
        if self._group is not None:
            self._group.kill()

    def close(self) -> None:
        """Ends the other ranks and releases the KV memory. No step may be running."""
        self.grammars.close()
        self.adapters.close()
        if self._group is not None:
            self._group.close()
        self.kv.close()

    def _flaw(self, segment: Segment) -> InvalidArgument | None:
        # The base model must never continue for an adapter that is not there.
        if segment.adapter and self.adapters.slot(segment.adapter) is None:
            return InvalidArgument(f"adapter {segment.adapter!r:.40} is not loaded here")
        return segment.flaw(self.layout, self.max_model_len, self.vocab_size, self.num_blocks)


def _score(segments: Sequence[Segment], logits: torch.Tensor) -> dict[int, KvRelayError]:
    """Adds the logits of all scored rows to their segments' scores. Returns the faults, by
    segment.
    """
    faults: dict[int, KvRelayError] = {}
    first = 0
    for place, segment in enumerate(segments):
        scores, rows = segment.scores, segment.scored
        if scores is not None and rows:
            own = logits[first : first + len(rows)]
            try:
                scores.add(rows, *score(own, scores.targets(rows), scores.count))
            except SequenceFault as fault:
                faults[place] = fault
            first += len(rows)
    return faults


def _on_gpu(loaded: LoadedModel, kv: KvPool, max_model_len: int) -> CudaForward:
    """Raises ModelRefused if flashinfer is not installed or does not fit."""
    try:
        return CudaForward.on_gpu(loaded.model, kv, max_model_len)
    except DoesNotFit as misfit:
        raise ModelRefused(
            f"{loaded.folder or 'the model'}: kvrelay's own engine cannot run it on a GPU: "
            f"{misfit}; set engine: vllm in both pools, or num_gpus: 0"
        ) from misfit


def _too_little_memory(kv_bytes: int, device: torch.device, error: Exception) -> ConfigError:
    return ConfigError(
        f"kv.memory: {kv_bytes} bytes leave too little memory on {device} for the model and its "
        f"steps; lower kv.memory: {error}"
    )


def _why_without_adapters(loaded: LoadedModel, group: RankGroup | None) -> str:
    """The reason why the model can have no adapters; empty if it can."""
    if group is not None:
        return (
            "ranks share the model, and their shares of an adapter are not supported; set "
            "tensor_parallel: 1"
        )
    if loaded.model.device.type != "cpu":
        return "the model is on a GPU, and adapters run on CPUs; set num_gpus: 0"
    return ""


def _why_without_eviction(loaded: LoadedModel, group: RankGroup | None) -> str:
    """The reason why tokens cannot be dropped; empty if they can."""
    if group is not None:
        return "ranks share the KV of a token; set tensor_parallel: 1, or leave eviction out"
    if loaded.model.device.type != "cpu":
        return "tokens are dropped on CPUs only; set num_gpus: 0, or leave eviction out"
    if loaded.windowed:
        return WHY_NOT_WITH_WINDOWS
    return ""


def _check_memory(layout: KvLayout, kv_bytes: int, longest: int, step_tokens: int) -> None:
    """Raises ConfigError unless the memory holds one sequence of `longest` tokens."""
    needed = layout.sequence_bytes(longest, step_tokens)
    if kv_bytes < needed:
        held = kv_bytes // layout.block_bytes * layout.block_size
        shorter = f", or model.max_model_len to at most {held}" if held else ""
        raise ConfigError(
            f"kv.memory: {kv_bytes} bytes do not hold one sequence of model.max_model_len = "
            f"{longest} tokens, which takes {needed} bytes; set kv.memory to at least that"
            f"{shorter}"
        )
