"""Reads adapters beside an event loop, from disks that may hang."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from kvrelay.errors import ModelRefused
from kvrelay.models.adapters.adapter_files import AdapterFiles, read_adapter

# Time for the files of one adapter.
READ_S = 30.0


async def read_in_time(folder: str, max_rank: int) -> AdapterFiles:
    """Returns what `read_adapter` returns. Raises its errors, and ModelRefused after READ_S.

    Nothing ends the read of a network mount whose server is gone. So each read has a thread of its
    own, which takes no place in a pool of threads and does not delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    read: asyncio.Future[AdapterFiles] = loop.create_future()

    def settle(found: AdapterFiles | BaseException) -> None:
        if read.done():
            return
        if isinstance(found, BaseException):
            read.set_exception(found)
        else:
            read.set_result(found)

    def run() -> None:
        found: AdapterFiles | BaseException
        try:
            found = read_adapter(folder, max_rank)
        # Raised again where the caller waits.
        except BaseException as error:  # noqa: BLE001
            found = error
        # The loop may have ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=run, name="adapter", daemon=True).start()
    try:
        async with asyncio.timeout(READ_S):
            return await read
    except TimeoutError:
        raise ModelRefused(
            f"{folder}: the files were not read within {READ_S:g} s; look at the disk or the "
            "network mount, and load the adapter again"
        ) from None
