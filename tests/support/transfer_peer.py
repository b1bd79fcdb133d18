"""A decode end in a process of its own: `python transfer_peer.py TRANSPORT BLOCK...` grants one
lease.

Prints the target as JSON; then, once it is committed, the blocks' bytes in hex, one per line. Ends
with stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

from support.transfer_ends import decode_end


async def main(transport: str, blocks: list[int]) -> None:
    async with decode_end() as decode:
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        print(json.dumps(asdict(decode.grant(blocks, transport=transport))), flush=True)
        while not decode.committed and not ended.done():
            await asyncio.sleep(0.001)
        for block in blocks:
            print(decode.arena.block(block).hex(), flush=True)
        await ended


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [int(text) for text in sys.argv[2:]]))
