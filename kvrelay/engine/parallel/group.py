"""Rank 0's side of tensor parallelism: starts the other ranks, sends them each step, and detects a
lost rank.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import numpy as np
import torch
import torch.distributed

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.parallel import channel, gpu_shares
from kvrelay.engine.parallel.settings import RankSettings
from kvrelay.engine.parallel.step_message import Numbers
from kvrelay.errors import ConfigError
from kvrelay.process.child import bound_to_parent

_PROGRAM = "kvrelay.engine.parallel.rank"


class RankGroup:
    """The ranks of one model. This process is rank 0, and has at most one group at a time.

    The worker ends if a rank dies. If this process ends for any reason, the kernel ends the other
    ranks.
    """

    def __init__(self, degree: int, device: str = "cpu") -> None:
        """Starts the other ranks, which import their modules in the background.

        The kernel ties them to the calling thread, so that thread has to outlive them. Raises
        ConfigError if this process already has a group, or sees too few GPUs.
        """
        assert degree > 1, "one rank needs no group"
        if torch.distributed.is_initialized():
            raise ConfigError(
                "tensor_parallel: this process already is a rank; each process runs one worker"
            )
        self.degree = degree
        self.device = device
        if device != "cpu" and torch.cuda.device_count() < degree:
            found = torch.cuda.device_count()
            raise ConfigError(
                f"tensor_parallel {degree}: this process sees {found} GPUs, and each rank "
                f"needs one; set tensor_parallel to at most {found}, or num_gpus: 0"
            )
        if device == "cpu":
            # transformers would distribute the GPUs that it sees.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self._processes = [self._start(rank, port) for rank in range(1, degree)]
        # The reason why no step can run although all processes may be alive.
        self._broken = ""

    def _start(self, rank: int, port: int) -> subprocess.Popen[str]:
        arguments = ("-m", _PROGRAM, str(rank), str(self.degree), str(port))
        return subprocess.Popen(
            bound_to_parent(sys.executable, *arguments),
            stdin=subprocess.PIPE,
            text=True,
            # Ctrl-C at a terminal reaches only rank 0, which finishes its streams.
            start_new_session=True,
            env={**os.environ, "LOCAL_RANK": str(rank)},
        )

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the other ranks."""
        return [process.pid for process in self._processes]

    def begin(self, settings: RankSettings) -> None:
        """Tells the other ranks to load their shares, and joins them. The caller then loads this
        rank's share.
        """
        for process in self._processes:
            assert process.stdin is not None
            # `lost` reports the dead rank.
            with suppress(BrokenPipeError):
                process.stdin.write(settings.to_json() + "\n")
                process.stdin.flush()
        assert self._listener is not None, "a group begins once"
        port = self._listener.getsockname()[1]
        listener, self._listener = self._listener, None
        channel.join(0, self.degree, port, self.device, listening_fd=listener.detach())

    def share(self, pool: KvPool) -> None:
        """Tells the other ranks to map or allocate their shares of the KV in `pool`, with the same
        number of blocks.
        """
        channel.tell(np.array([pool.num_blocks, -1 if pool.fd is None else pool.fd]))
        if pool.fd is None:
            pool.shares = gpu_shares.exchange(pool.buffer)

    def tell(self, numbers: Numbers) -> None:
        """Sends numbers to all other ranks, each of which must call `channel.hear`."""
        channel.tell(numbers)

    def fail(self, why: str) -> None:
        """Marks the group as broken: no step can run any more."""
        self._broken = why

    def lost(self) -> str:
        """Describes the rank that has ended, or the other reason why no step can run. Empty while
        steps can run.
        """
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"rank {rank} of {self.degree} (process {process.pid}) ended with {how}"
        return self._broken

    def kill(self) -> None:
        """Kills the other ranks, which hold no state worth saving. A running step fails or waits
        forever.
        """
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()

    def close(self) -> None:
        """Ends the group. No step may be running. Safe to call twice."""
        self.kill()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        elif torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
