"""The decode stage of a worker whose engine is vLLM."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.decode_stage import DecodeStage
from kv_transfer.lease import Lease
from kv_transfer.transports.vllm_nixl import VllmReads
from kvrelay.errors import Code
from kvrelay.vllm_engine.batch import VllmBatch
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.model import VllmModel
from kvrelay.worker.batches import DecodeBatch
from kvrelay.worker.context import Key, WorkerContext
from kvrelay.worker.stage import StageLoad
from kvrelay.worker.steps.step_loop import Reporter, Steps


class VllmDecodeStage(DecodeStage):
    """Leases staging blocks for hand-offs, or promises vLLM's; vLLM has the batch and its
    blocks.
    """

    def __init__(self, context: WorkerContext, engine: VllmEngine, model: VllmModel) -> None:
        self._vllm = VllmBatch(context, engine, model, leaves=False)
        self.findable, self.lacks = self._vllm.findable, self._vllm.lacks
        super().__init__(context)

    def _batch(self) -> tuple[DecodeBatch, Callable[[Reporter], Steps]]:
        return self._vllm.scheduler, self._vllm.steps

    def check_integrity(self) -> None:
        """Checks vLLM's own blocks. Raises IntegrityError."""
        self._vllm.check_integrity()

    def load(self) -> StageLoad:
        """The current load, with vLLM's blocks and the staging blocks."""
        return self._vllm.with_blocks(super().load())

    def _vllm_reads(self) -> VllmReads | None:
        return self._vllm.reads

    def _join(self, lease: Lease, first_token: int, num_tokens: int) -> None:
        super()._join(lease, first_token, num_tokens)
        if lease.key not in self._decoding:
            self._forget(lease.key)

    def abort(self, key: Key) -> None:
        """Ends a sequence, and the read of its KV."""
        super().abort(key)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        if self._vllm.reads is not None:
            self._vllm.reads.forget(key)

    def keep_house(self, now: float) -> None:
        """Measures the batch, ends leases past their time, and fails sequences whose read does not
        end. Another worker then continues them.
        """
        super().keep_house(now)
        for key in () if self._vllm.reads is None else self._vllm.reads.overdue(now):
            self.abort(key)
            if key in self._context.sessions:
                text = "vLLM did not end the read of the KV in time"
                self._context.fail(key, Code.UNAVAILABLE, text)

    def _busy_share(self, blocks: float) -> float:
        return super()._busy_share(self._vllm.busy_blocks)
