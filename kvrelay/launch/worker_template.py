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

import os
import socket
import subprocess
import sys
from types import TracebackType

from kvrelay.config.schema import ClusterConfig
from kvrelay.process.child import bound_to_parent
from kvrelay.process.owned_folder import OwnedFolder

# Workers that start while the template imports.
_BACKLOG = 128
# Time in which the template must end.
_END_S = 10.0


class Template:
    """Context manager. The template process of this machine runs inside it; `path` is its
    socket.
    """

    def __init__(self, threads: int) -> None:
        """threads: the number of threads that OpenMP reads from the environment when torch is
        imported.
        """
        self._threads = threads
        self._folder = OwnedFolder("template")
        self._process: subprocess.Popen[bytes] | None = None
        self.path = ""

    @classmethod
    def suits(cls, config: ClusterConfig) -> bool:
        """Whether workers can be forked. All pools must have the same number of threads, no GPUs,
        because the GPU driver needs an environment per process, and the native engine, since vLLM
        reads its environment when it is imported.
        """
        pools = (config.prefill, config.decode)
        return (
            not any(pool.resources.num_gpus or pool.engine == "vllm" for pool in pools)
            and len({pool.threads for pool in pools}) == 1
        )

    def __enter__(self) -> Template:
        self.path = str(self._folder.__enter__().path / "socket")
        # Created here, so that the socket exists from now on. Connections fail once the template
        # ends.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.path)
            listener.listen(_BACKLOG)
            self._process = subprocess.Popen(
                bound_to_parent(
                    sys.executable, "-m", "kvrelay.launch.template_process", str(listener.fileno())
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
        self._folder.__exit__(kind, error, trace)
