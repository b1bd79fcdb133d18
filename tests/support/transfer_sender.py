"""A prefill end in a process of its own: `python transfer_sender.py TARGET` sends two blocks, says
so, and no more.

TARGET is JSON. Ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys

from support.transfer_ends import KEY, MemoryFile, sender_of

from kvrelay.worker_messages import HandoffTarget


async def main(target: HandoffTarget) -> None:
    async with sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, target)
        push.send(0, [1, 2])
        while not push.bytes_packed and not push.error:
            await asyncio.sleep(0.001)
        print(push.error or "sent", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await push.abort()


if __name__ == "__main__":
    asyncio.run(main(HandoffTarget(**json.loads(sys.argv[1]))))
