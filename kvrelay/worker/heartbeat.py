"""The content of a worker's heartbeat."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice

from kvrelay.engine.kvcache.block_pool import IntegrityError
from kvrelay.protocol_version import ours
from kvrelay.types.workers import WorkerInfo, WorkerLoad, WorkerState
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.stage import BlockCounts, Stage, StageLoad
from kvrelay.worker.steps.meter import Meter, resident_bytes

# Adapters whose refusal a heartbeat tells, and characters of each reason.
_MAX_REFUSED, _MAX_REASON = 16, 400


class Heartbeat:
    """Describes one worker: what it is, its state and its load."""

    def __init__(self, context: WorkerContext, meter: Meter) -> None:
        self._context = context
        self._meter = meter
        # The host's report on the worker's certificate.
        self.certificate_note = ""
        # The installed adapters, and the reasons why others are not, by id.
        self.adapters = context.runner.adapters.ids
        self.refused_adapters: dict[str, str] = {}
        self._integrity_error = ""

    def check_integrity(self, stage: Stage) -> None:
        """Checks that all blocks are accounted for. The next load reports the result."""
        try:
            self._context.cache.check_integrity()
            stage.check_integrity()
            self._integrity_error = ""
        except IntegrityError as error:
            self._integrity_error = str(error)

    def info(
        self, state: WorkerState, load: WorkerLoad, lacks: frozenset[str] = frozenset()
    ) -> WorkerInfo:
        """The whole heartbeat. lacks: features of the protocol that the engine does not have."""
        features = tuple(name for name in ours().features if name not in lacks)
        identity, runner = self._context.identity, self._context.runner
        claim, windows, layout = identity.claim, self._context.cache.windows, runner.layout
        units = self._context.cache.pool.units
        return WorkerInfo(
            worker_id=identity.worker_id,
            pool=identity.pool,
            epoch=identity.epoch,
            state=state,
            address=identity.address,
            model_id=runner.model_id,
            layout_hash=runner.layout_hash,
            block_size=runner.layout.block_size,
            block_bytes=runner.layout.block_bytes,
            host_id=identity.host_id,
            max_model_len=runner.max_model_len,
            load=load,
            pid=os.getpid(),
            tensor_parallel=runner.layout.ranks,
            started_by="" if claim is None else claim.owner,
            term=0 if claim is None else claim.term,
            protocol=replace(ours(), features=features),
            sampled_model_id=runner.sampled_model_id,
            tokenizer_id=runner.tokenizer_id,
            vocab_size=runner.vocab_size,
            engine=runner.engine,
            adapters=self.adapters,
            window_tokens=0 if windows is None else windows.most_blocks * layout.block_size,
            windowed_share=0.0 if windows is None else units.windowed / units.all,
            refused_adapters=tuple(
                f"{one} {why[:_MAX_REASON]}"
                for one, why in islice(self.refused_adapters.items(), _MAX_REFUSED)
            ),
        )

    def load(self, stage: StageLoad) -> WorkerLoad:
        """The load of the stage, with the figures that both stages have in common."""
        runner, pool, meter = self._context.runner, self._context.cache.pool, self._meter
        draft = self._context.draft
        blocks = stage.blocks or BlockCounts(0, 0, 0).with_pool(pool)
        resident, shared = resident_bytes(runner.rank_pids)
        return WorkerLoad(
            running=stage.running,
            waiting=len(stage.waiting),
            waiting_tokens=sum(sequence.uncomputed for sequence in stage.waiting),
            blocks_total=blocks.total,
            blocks_held=blocks.held,
            blocks_cached=blocks.cached,
            leases=stage.leases,
            tokens_per_second=meter.tokens_per_second(),
            weight_bytes=runner.weight_bytes
            + runner.adapters.nbytes
            + (0 if draft is None else draft.weight_bytes),
            kv_bytes=runner.kv_bytes + (0 if draft is None else draft.kv_bytes),
            rss_bytes=resident,
            shared_bytes=shared,
            integrity_ok=not self._integrity_error,
            integrity_error=self._integrity_error,
            preemptions=stage.preemptions,
            draft_tokens=meter.draft_tokens,
            accepted_tokens=meter.accepted_tokens,
            dropped_tokens=stage.dropped_tokens,
            queue_wait_p95_ms=meter.queue_wait_p95_ms(),
            certificate_note=self.certificate_note,
            step_age_s=self._context.engine.watch.age_s,
            busy_share=stage.busy_share,
            blocks_leased=stage.blocks_leased,
            prompt_tokens_per_second=stage.prompt_tokens_per_second,
            tiers=() if self._context.tiers is None else self._context.tiers.load(),
        )
