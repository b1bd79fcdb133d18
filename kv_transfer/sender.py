"""The prefill worker's end of all hand-offs: its arena, and its connections to decode workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kv_transfer.blocks.arena import Arena, device_of
from kv_transfer.channels import Channels
from kv_transfer.push import Push
from kv_transfer.retry_policy import PushAttempt
from kv_transfer.transport_selection import choose_transport
from kv_transfer.transports import Outbound, memory, vllm_nixl
from kv_transfer.transports.cuda_ipc import CudaIpcOutbound
from kv_transfer.transports.group_outbound import SenderGroups
from kv_transfer.transports.grpc import GrpcOutbound
from kv_transfer.transports.named import NamedOutbound
from kv_transfer.transports.nixl import NixlOutbound, ServedArena
from kv_transfer.transports.vllm_nixl import VllmOutbound
from kvrelay.clock import Clock
from kvrelay.protocol_version import Protocol, ours
from kvrelay.security.credentials import Credentials
from kvrelay.wire.transfer import KvOpen
from kvrelay.worker_messages import HandoffTarget


class Sender:
    """Pushes KV from one arena to any number of decode workers. Lives on one event loop.

    A peer that takes no bytes or sends no receipt for `timeout_s` seconds counts as gone.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        worker_id: str,
        host_id: str,
        model_id: str,
        layout_hash: str,
        sampled_model_id: str = "",
        clock: Clock,
        digests: bool = True,
        host: str = "127.0.0.1",
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
        in_vllm: bool = False,
    ) -> None:
        """in_vllm: whether the KV lies in vLLM's memory, which only vllm-nixl hands over."""
        self.worker_id = worker_id
        self.arena = arena
        self.host_id = host_id
        self.model_id = model_id
        # The model's id for a receiver of protocol 0.
        self.sampled_model_id = sampled_model_id
        self.layout_hash = layout_hash
        self.clock = clock
        self.digests = digests
        self.timeout_s = timeout_s
        self._credentials = credentials
        self._in_vllm = in_vllm
        self.channels = Channels(arena.layout, credentials)
        self._groups = SenderGroups(host, timeout_s)
        self._served = ServedArena(arena, host)
        memory.register_sender(arena)

    def open(
        self, key: tuple[str, int], target: HandoffTarget, adapter: str = "", num_tokens: int = 0
    ) -> Push:
        """Starts a push of KV that is computed with the adapter, without waiting for the peer.
        num_tokens: of the prompt, for layouts with windows. Raises Unimplemented for a transport
        that cannot work.
        """
        transport, why = choose_transport(
            target.transport,
            same_process=memory.is_local(target.worker_id, target.epoch),
            same_host=target.host_id == self.host_id,
            device=device_of(self.arena),
            target_device=target.device,
            tls=self._credentials is not None,
            in_vllm=self._in_vllm,
        )
        return Push(self, key, target, PushAttempt(transport, why), adapter, num_tokens)

    @asynccontextmanager
    async def outbound(self, transport: str, target: HandoffTarget) -> AsyncIterator[Outbound]:
        """The sending half for one push. After an exit without an exception, its connections are
        reused.
        """
        match transport:
            case "memory" | "shm":
                yield NamedOutbound(self.arena, digests=self.digests)
            case "nixl":
                yield NixlOutbound(self._served, self.arena, digests=self.digests)
            case vllm_nixl.NAME:
                yield VllmOutbound()
            case "cuda_ipc":
                yield CudaIpcOutbound(self.arena, digests=self.digests)
            case "gloo" | "nccl":
                async with self._groups.lend(
                    transport, target, self.arena, digests=self.digests
                ) as outbound:
                    yield outbound
            case _:
                yield GrpcOutbound(self.arena, digests=self.digests)

    def opening(
        self, key: tuple[str, int], target: HandoffTarget, transport: str, adapter: str = ""
    ) -> KvOpen:
        """The first frame of a push of `key`, a request id and an attempt. `adapter` is the hash of
        the adapter that the KV is computed with.
        """
        request_id, attempt = key
        model_id, layout_hash, protocol = self.model_id, self.layout_hash, ours()
        # A target with protocol 0 may also come through a router of protocol 0, which drops unknown
        # fields. The receiver then treats this sender as one of protocol 0.
        if target.protocol < 1 and self.sampled_model_id:
            model_id = self.sampled_model_id
            layout_hash = self.arena.layout.hash(model_id)
            protocol = Protocol()
        return KvOpen(
            request_id=request_id,
            attempt=attempt,
            lease_id=target.lease_id,
            epoch=target.epoch,
            generation=target.generation,
            layout_hash=layout_hash,
            transport=transport,
            model_id=model_id,
            # Blocks without their windowed parts can be taken only as they are.
            layout=None if self.arena.layout.windows else self.arena.layout,
            sender=self.worker_id,
            capability=target.capability,
            protocol=protocol,
            adapter=adapter,
        )

    async def close(self) -> None:
        """Closes the connections. Running pushes fail."""
        await self.channels.close()
        self._groups.close()
        self._served.close()
