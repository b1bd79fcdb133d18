from __future__ import annotations

import pytest
from transfer_ends import KEY, LAYOUT, MemoryFile, decode_end, sender_of


@pytest.mark.parametrize("transport", ["memory", "shm", "grpc"])
async def test_kv_arrives_byte_for_byte(transport: str) -> None:
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source) as sender:
        target = decode.grant([9, 3, 4, 5, 20], transport=transport)
        push = sender.open(KEY, target)
        push.send(0, [1, 2])
        push.send(2, [3, 17, 0])
        handoff = await push.commit(42, 5 * LAYOUT.block_size, 5.0)
        assert (handoff.transport, handoff.blocks, handoff.bytes) == (transport, 5, 5 * LAYOUT.block_bytes)
        assert [decode.arena.block(n) for n in (9, 3, 4, 5, 20)] == [source.block(n) for n in (1, 2, 3, 17, 0)]
        (lease, token, count), *rest = decode.committed
        assert (lease.lease_id, token, count, rest) == (target.lease_id, 42, 20, [])
        assert len(decode.leases) == 0
