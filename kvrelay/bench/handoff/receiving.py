"""The decode worker's end of hand-offs, in a separate process without a model. The argument is
`Settings` as JSON: `python -m … SETTINGS`.

Reads a line of JSON for each lease to grant and answers with the hand-off target. Exits when stdin
ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from kv_transfer.blocks.block_copy import without_kernel
from kv_transfer.channels import message_bytes
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.receiver import Receiver
from kv_transfer.transport_selection import host_id
from kvrelay.clock import MonotonicClock
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import add_kv_transfer_servicer
from kvrelay.worker.runtime.heap import keep_freed_memory
from kvrelay.worker_messages import HandoffTarget

# Worker id of the sending end.
SENDER = "sending"
_LEASE_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the receiving process, passed as JSON on its command line."""

    layout: KvLayout
    num_blocks: int
    model_id: str
    digests: bool
    core: int

    def as_json(self) -> str:
        """Returns the settings as JSON, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Reads the settings that `as_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "layout": KvLayout.of_fields(fields["layout"])})


async def main(settings: Settings) -> None:
    """Serves hand-offs on the core of the settings until stdin ends."""
    os.sched_setaffinity(0, {settings.core})
    keep_freed_memory()
    without_kernel()
    pool = KvPool(settings.layout, settings.num_blocks)
    # Touches each page, so that no hand-off pays for the first use of a page.
    pool.buffer.zero_()
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
    """Does nothing with a committed lease. The next lease may use the same blocks."""


if __name__ == "__main__":
    asyncio.run(main(Settings.from_json(sys.argv[1])))
