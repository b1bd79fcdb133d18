"""A template process that has imported everything a worker needs. Each worker is forked from it, so
a start takes no imports.

    actor ── connects, writes settings ──▶ template ── forks ──▶ worker
      └──────── drain, stop, turn ────────────────────────────────▶ │
      ◀──────── started, then how it ended ──────────────────────── ┘

The messages are lines of JSON over a Unix socket in a folder that only this user can enter. The
worker belongs to the actor and ends when the actor does; a worker that cannot end, for example
because it is frozen, is killed by the template. The template imports while Ray starts; actors that
connect meanwhile wait.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any

from kvrelay import errors
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.orphans import Orphans
from kvrelay.launch.pool_switch import Roles
from kvrelay.process.child import bound_to_parent
from kvrelay.process.telemetry import configure_logging, flush_logs, get_logger
from kvrelay.types import Claim
from kvrelay.worker.settings import WorkerSettings

# Workers that start while the template imports.
_BACKLOG = 128
# Time in which a worker must end after its actor.
_ORPHAN_S = 5.0
# Time in which the template must end.
_END_S = 10.0
_FAILED = 1

log = get_logger("launch")


class Template:
    """Context manager. The template process of this machine runs inside it; `path` is its
    socket.
    """

    def __init__(self, threads: int) -> None:
        """threads: the number of threads that OpenMP reads from the environment when torch is
        imported.
        """
        self._threads = threads
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.path = ""

    @classmethod
    def suits(cls, config: ClusterConfig) -> bool:
        """Whether workers can be forked. All pools must have the same number of threads and no
        GPUs, because the GPU driver needs an environment per process.
        """
        pools = (config.prefill, config.decode)
        return (
            not any(pool.resources.num_gpus for pool in pools)
            and len({pool.threads for pool in pools}) == 1
        )

    def __enter__(self) -> Template:
        self._folder = tempfile.mkdtemp(prefix="kvrelay-template-")
        self.path = os.path.join(self._folder, "socket")
        # Created here, so that the socket exists from now on. Connections fail once the template
        # ends.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.path)
            listener.listen(_BACKLOG)
            self._process = subprocess.Popen(
                bound_to_parent(
                    sys.executable, "-m", "kvrelay.launch.template", str(listener.fileno())
                ),
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(self._threads),
                    "OMP_WAIT_POLICY": "PASSIVE",
                },
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        # The template then kills the workers that their actors have left.
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def settings_to_json(settings: WorkerSettings) -> dict[str, Any]:
    """Returns the settings as plain data for JSON, for `settings_from_json`."""
    values = {name: getattr(settings, name) for name in settings.__slots__}
    claim = None if settings.claim is None else asdict(settings.claim)
    return {**values, "config": settings.config.model_dump(mode="json"), "claim": claim}


def settings_from_json(values: dict[str, Any]) -> WorkerSettings:
    """Reads the settings that `settings_to_json` wrote."""
    claim = None if values["claim"] is None else Claim(**values["claim"])
    return WorkerSettings(
        **{**values, "config": ClusterConfig.model_validate(values["config"]), "claim": claim}
    )


def _error(name: str, message: str) -> Exception:
    """Rebuilds the error that ended a worker: kvrelay's and Python's own errors by their type,
    others as Unavailable.
    """
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:
            # The constructor needs more than a message.
            return RuntimeError(f"{name}: {message}")
    return errors.Unavailable(f"{name}: {message}")


class ForkedWorker:
    """A worker that was requested from the template, as seen by its actor. Belongs to one event
    loop.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(
        cls, path: str, settings: WorkerSettings, variables: Mapping[str, str]
    ) -> ForkedWorker:
        """Requests a worker from the template at `path`. Raises OSError if there is no template."""
        worker = cls(*await asyncio.open_unix_connection(path))
        worker.tell(settings=settings_to_json(settings), variables=dict(variables))
        return worker

    def tell(self, **order: object) -> None:
        """Sends an order, for example drain=True or turn="decode"."""
        self._writer.write(json.dumps(order).encode() + b"\n")

    async def started(self) -> bool:
        """Waits until the worker's process runs. Returns False if the template ended before."""
        try:
            return bool(await self._reader.readline())
        except ConnectionError:
            return False

    async def ended(self) -> None:
        """Waits until the worker has ended. Raises the error that ended the worker, or Unavailable
        if its process died.
        """
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        self._writer.close()
        if not line:
            raise errors.Unavailable("the worker process ended")
        result = json.loads(line)
        if result["error"]:
            raise _error(result["error"], result["message"])


def main(descriptor: int) -> None:
    """Runs the template on a listening socket, until SIGTERM."""
    listener = socket.socket(fileno=descriptor)
    _import_all()
    # The kernel then reaps ended children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    orphans = Orphans(listener.fileno())
    try:
        while True:
            orphans.wait()
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
    from kvrelay.worker.process import run_in_process

    configure_logging()
    roles = Roles()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, roles)
    threading.Thread(target=_take_orders, args=(orders, roles, loop), daemon=True).start()
    try:
        await run_in_process(settings.worker_id, roles.serve(settings))
    except errors.KvRelayError as error:
        return {"error": type(error).__name__, "message": error.message}
    except Exception as error:
        log.exception("worker_failed", worker=settings.worker_id)
        return {"error": type(error).__name__, "message": str(error)}
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
