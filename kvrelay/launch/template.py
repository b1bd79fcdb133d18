"""A process that has imported all that a worker needs and is forked for each one, so that a start
takes no imports.

    actor ── connects, writes settings ──▶ template ── forks ──▶ worker
      └──────── drain, stop, turn ────────────────────────────────▶ │
      ◀──────── started, then how it ended ──────────────────────── ┘

Lines of JSON over a Unix socket in a folder that only this user can enter. The worker belongs to
the actor: it ends when the actor does. The template imports in parallel with the start of Ray;
those who connect meanwhile wait.
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
from kvrelay.launch.pool_switch import Roles
from kvrelay.process.child import bound_to_parent
from kvrelay.process.telemetry import configure_logging, flush_logs, get_logger
from kvrelay.types import Claim
from kvrelay.worker.settings import WorkerSettings

_BACKLOG = 128  # workers that start while the template imports
_ORPHAN_S = 5.0  # that a worker may take to end after its actor
_FAILED = 1

log = get_logger("launch")


class Template:
    """Context manager: the template process of this machine runs inside it; `path` is its
    socket.
    """

    def __init__(self, threads: int) -> None:
        """threads: what OpenMP takes from the environment when torch is imported."""
        self._threads = threads
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.path = ""

    @classmethod
    def suits(cls, config: ClusterConfig) -> bool:
        """Whether workers can be forked: not on GPUs, whose driver wants each process's own
        environment.
        """
        pools = (config.prefill, config.decode)
        return (
            not any(pool.resources.num_gpus for pool in pools)
            and len({pool.threads for pool in pools}) == 1
        )

    def __enter__(self) -> Template:
        self._folder = tempfile.mkdtemp(prefix="kvrelay-template-")
        self.path = os.path.join(self._folder, "socket")
        # Made here, so that it is there from now on; when the template ends, nobody listens any
        # more.
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
        self._process.kill()  # it holds nothing
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def settings_to_json(settings: WorkerSettings) -> dict[str, Any]:
    values = {name: getattr(settings, name) for name in settings.__slots__}
    claim = None if settings.claim is None else asdict(settings.claim)
    return {**values, "config": settings.config.model_dump(mode="json"), "claim": claim}


def settings_from_json(values: dict[str, Any]) -> WorkerSettings:
    claim = None if values["claim"] is None else Claim(**values["claim"])
    return WorkerSettings(
        **{**values, "config": ClusterConfig.model_validate(values["config"]), "claim": claim}
    )


def _error(name: str, message: str) -> Exception:
    """What a worker ended of: kvrelay's and Python's own errors as they were, others as
    Unavailable.
    """
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # it wants more than a message
            return RuntimeError(f"{name}: {message}")
    return errors.Unavailable(f"{name}: {message}")


class ForkedWorker:
    """A worker that the template was asked for, as its actor sees it. Lives on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(
        cls, path: str, settings: WorkerSettings, variables: Mapping[str, str]
    ) -> ForkedWorker:
        """Raises OSError if no template is there."""
        worker = cls(*await asyncio.open_unix_connection(path))
        worker.tell(settings=settings_to_json(settings), variables=dict(variables))
        return worker

    def tell(self, **order: object) -> None:
        """An order, such as drain=True or turn="decode"."""
        self._writer.write(json.dumps(order).encode() + b"\n")

    async def started(self) -> bool:
        """Waits until the worker's process runs. False: the template ended before."""
        try:
            return bool(await self._reader.readline())
        except ConnectionError:
            return False

    async def ended(self) -> None:
        """Waits until the worker has ended; raises what it ended of."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        self._writer.close()
        if not line:
            raise errors.Unavailable("the worker's process died")
        result = json.loads(line)
        if result["error"]:
            raise _error(result["error"], result["message"])


def main(descriptor: int) -> None:
    """The template, on a socket that listens. Until it is killed."""
    listener = socket.socket(fileno=descriptor)
    _import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes away those that have ended
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _worker(connection)
        connection.close()


def _import_all() -> None:
    gc.disable()  # it would look again and again through what stays
    import decode_worker.main  # noqa: F401
    import prefill_worker.main  # noqa: F401

    gc.enable()
    gc.collect()
    gc.freeze()  # so that the collector of no worker copies these pages
    assert threading.active_count() == 1, "a thread would not outlive the fork"


def _worker(connection: socket.socket) -> None:
    """In the forked process, which ends here."""
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
        sys.stderr.write(f"worker: {error}\n")  # the actor is gone
    finally:
        flush_logs()
        os._exit(code)


async def _serve(settings: WorkerSettings, orders: IO[str]) -> dict[str, str]:
    """Serves until it is told to end; how it ended."""
    # Not at the top: whoever launches workers imports this and needs no torch.
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
    """In a thread of its own, until the actor is gone; then the worker ends, whether its event loop
    comes by or not.
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
