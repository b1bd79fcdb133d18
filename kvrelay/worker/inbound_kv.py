"""KV that other workers push into leased blocks of this worker."""

from __future__ import annotations

from kv_transfer.blocks.arena import device_of
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.receiver import OnCommit, Receiver
from kv_transfer.transports.vllm_nixl import VllmReads
from kvrelay.protocol_version import VERSION
from kvrelay.worker.context import WorkerContext
from kvrelay.worker_messages import HandoffTarget


class InboundKv:
    """The leases of this worker's blocks, and the receiver of the pushes to them."""

    def __init__(
        self, context: WorkerContext, on_commit: OnCommit, vllm_reads: VllmReads | None = None
    ) -> None:
        """vllm_reads: see `Receiver`."""
        identity, runner = context.identity, context.runner
        self._identity = identity
        self._runner = runner
        self.leases = LeaseTable(identity.epoch)
        self.receiver = Receiver(
            runner.kv,
            self.leases,
            worker_id=identity.worker_id,
            model_id=runner.model_id,
            sampled_model_id=runner.sampled_model_id,
            layout_hash=runner.layout_hash,
            on_commit=on_commit,
            clock=context.clock,
            digests=context.config.pool_kv(identity.pool).digest,
            host=context.config.listen.worker_host,
            vllm_reads=vllm_reads,
        )

    def target(
        self, lease: Lease, cached_tokens: int, sender: str, transport: str = "auto"
    ) -> HandoffTarget:
        """Returns the address and the capability with which the worker `sender` pushes to the
        lease. `cached_tokens` is the length of the prefix whose KV the blocks hold already.
        """
        return HandoffTarget(
            worker_id=self._identity.worker_id,
            address=self._identity.address,
            epoch=self._identity.epoch,
            lease_id=lease.lease_id,
            generation=lease.generation,
            num_blocks=len(lease.blocks),
            cached_tokens=cached_tokens,
            layout_hash=self._runner.layout_hash,
            host_id=self._identity.host_id,
            device=device_of(self._runner.kv),
            transport=transport,
            capability=self.receiver.capability(lease, sender),
            protocol=VERSION,
        )
