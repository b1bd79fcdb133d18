"""The template process, and the workers that are forked from it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from typing import IO

from kvrelay.errors import KvRelayError
from kvrelay.launch.forked_worker import settings_from_json
from kvrelay.launch.orphans import Orphans
from kvrelay.launch.pool_switch import Roles
from kvrelay.launch.reaper import Reaper
from kvrelay.process.telemetry import configure_logging, flush_logs, get_logger
from kvrelay.worker.runtime.settings import WorkerSettings

# Time in which a worker must end after its actor.
_ORPHAN_S = 5.0
_FAILED = 1
# Characters of the error that a worker ends with.
_MOST_TEXT = 10_000

log = get_logger("launch")


def main(descriptor: int) -> None:
    """Runs the template on a listening socket, until SIGTERM."""
    listener = socket.socket(fileno=descriptor)
    configure_logging(at_once=True)
    _import_all()
    reaper = Reaper()
    # Until `orphans.wait`, which lets it through.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    orphans = Orphans(listener.fileno(), {reaper.fileno(): reaper.reap})
    try:
        while True:
            orphans.wait()
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                reaper.close()
                listener.close()
                _worker(connection)
            orphans.watch(_peer(connection), pid)
            connection.close()
    finally:
        orphans.kill_all()


def _peer(connection: socket.socket) -> int:
    """Returns the process id of the actor at the other end."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def _import_all() -> None:
    # The collector would repeatedly scan objects that stay alive.
    gc.disable()
    import decode_worker.main  # noqa: F401
    import prefill_worker.main  # noqa: F401

    gc.enable()
    gc.collect()
    # So that the collectors of the workers do not write to, and so copy, these pages.
    gc.freeze()
    assert threading.active_count() == 1, "a thread would not outlive the fork"


def _worker(connection: socket.socket) -> None:
    """Runs the worker in the forked process, and ends the process."""
    code = _FAILED
    try:
        orders = connection.makefile("r")
        first = json.loads(orders.readline())
        connection.sendall(b"{}\n")
        os.environ.update(first["variables"])
        result = asyncio.run(_serve(settings_from_json(first["settings"]), orders))
        connection.sendall(json.dumps(result).encode() + b"\n")
        code = 0
    except (OSError, ValueError) as error:
        # The actor is gone.
        sys.stderr.write(f"worker: {error}\n")
    finally:
        flush_logs()
        os._exit(code)


async def _serve(settings: WorkerSettings, orders: IO[str]) -> dict[str, str]:
    """Serves until told to end. Returns how the worker ended."""
    # Imported here, because processes that launch workers import this module and do not need torch.
    from kvrelay.worker.runtime.process import run_in_process

    configure_logging()
    roles = Roles()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, roles)
    threading.Thread(target=_take_orders, args=(orders, roles, loop), daemon=True).start()
    try:
        await run_in_process(settings.worker_id, roles.serve(settings))
    except KvRelayError as error:
        return {"error": type(error).__name__, "message": error.message[:_MOST_TEXT]}
    except Exception as error:
        log.exception("worker_failed", worker=settings.worker_id)
        return {"error": type(error).__name__, "message": str(error)[:_MOST_TEXT]}
    return {"error": "", "message": ""}


def _take_orders(orders: IO[str], roles: Roles, loop: asyncio.AbstractEventLoop) -> None:
    """Receives orders in a separate thread until the actor is gone. Then ends the worker, even if
    its event loop is blocked.
    """
    try:
        for line in orders:
            match json.loads(line):
                case {"turn": pool}:
                    loop.call_soon_threadsafe(roles.turn, pool)
                case {"drain": True}:
                    loop.call_soon_threadsafe(roles)
                case {"stop": True}:
                    loop.call_soon_threadsafe(roles.now)
        loop.call_soon_threadsafe(roles.now)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # It ends already, and there is nobody to give an order to.
    time.sleep(_ORPHAN_S)
    os._exit(_FAILED)


if __name__ == "__main__":
    main(int(sys.argv[1]))
