"""A decode worker's end of hand-offs in a process of its own, without a model: `python -m …
SETTINGS`, as JSON.

Reads a line of JSON for each lease to grant and answers with its target; ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from kv_transfer.block_copy import without_kernel
from kv_transfer.channels import message_bytes
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.receiver import Receiver
from kv_transfer.transport_selection import host_id
from kvrelay.clock import MonotonicClock
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.messages import HandoffTarget
from kvrelay.types import KvLayout, LayerKv
from kvrelay.wire.transfer import add_kv_transfer_servicer
from kvrelay.worker.heap import keep_freed_memory

SENDER = "sending"  # worker id of the other end
_LEASE_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    layout: KvLayout
    num_blocks: int
    model_id: str
    digests: bool
    core: int

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        fields = json.loads(text)
        layout = fields.pop("layout")
        layout["layers"] = tuple(LayerKv(**layer) for layer in layout["layers"])
        return cls(layout=KvLayout(**layout), **fields)


async def main(settings: Settings) -> None:
    os.sched_setaffinity(0, {settings.core})
    keep_freed_memory()
    without_kernel()
    pool = KvPool(settings.layout, settings.num_blocks)
    pool.buffer.zero_()  # so that no hand-off pays for a page's first use
    leases = LeaseTable(epoch=1)
    clock = MonotonicClock()
    receiver = Receiver(
        pool,
        leases,
        worker_id="receiving",
        model_id=settings.model_id,
        layout_hash=settings.layout.hash(settings.model_id),
        on_commit=_forget,
        clock=clock,
        digests=settings.digests,
    )
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", message_bytes(settings.layout))]
    )
    add_kv_transfer_servicer(receiver.Push, None, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        lease = leases.grant(
            (request["request_id"], 1), range(request["num_blocks"]), 0, _LEASE_S, clock.now()
        )
        target = HandoffTarget(
            worker_id="receiving",
            address=address,
            epoch=leases.epoch,
            lease_id=lease.lease_id,
            generation=lease.generation,
            num_blocks=len(lease.blocks),
            cached_tokens=0,
            layout_hash=settings.layout.hash(settings.model_id),
            host_id=host_id(),
            transport=request["transport"],
            capability=receiver.capability(lease, SENDER),
        )
        print(json.dumps(asdict(target)), flush=True)
    await server.stop(None)


def _forget(lease: Lease, first_token: int, num_tokens: int) -> Any:
    """The next lease may have the same blocks."""


if __name__ == "__main__":
    asyncio.run(main(Settings.from_json(sys.argv[1])))
