"""Where torch.distributed listens: it authenticates nobody, so nowhere but on the worker's own
address.
"""

from __future__ import annotations

import socket

from support.listening import listening
from support.transfer_ends import KEY, MemoryFile, decode_end, sender_of


async def test_the_store_listens_on_the_workers_address_only() -> None:
    before = listening()
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1, 2], transport="gloo"))
        push.send(0, [5, 6])
        await push.commit(1, 8, 0.0)
        opened = listening() - before
        assert len(opened) >= 2, "the receiver's server and the sender's store"
        assert {host for host, _ in opened} == {"127.0.0.1"}
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in {host for host, _ in listening() - before}, (
            "the look itself would see it"
        )
