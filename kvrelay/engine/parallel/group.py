"""Rank 0's side: it starts the other ranks, tells them each step, and notices when one is gone."""

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
    """The ranks of one model; this process is rank 0, and can be that of one group at a time.

    A rank that dies takes the worker with it, and the kernel ends the others with this process,
    however it ends.
    """

    def __init__(self, degree: int, device: str = "cpu") -> None:
        """Starts the others, which import what they need meanwhile. The kernel ties them to the
        calling thread, so it has to last. Raises ConfigError if this process has a group, or sees
        too few GPUs."""
        assert degree > 1, "one rank needs no group"
        if torch.distributed.is_initialized():
            raise ConfigError(
                "tensor_parallel: this process is a rank already; there is one worker to a process"
            )
        self.degree = degree
        self.device = device
        if device != "cpu" and torch.cuda.device_count() < degree:
            found = torch.cuda.device_count()
            raise ConfigError(
                f"tensor_parallel {degree}: {found} GPUs are seen here, and each rank needs one of "
                f"its own"
            )
        if device == "cpu":
            # Transformers would share out GPUs that it sees
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self._processes = [self._start(rank, port) for rank in range(1, degree)]
        self._broken = ""  # why, though all processes may run

    def _start(self, rank: int, port: int) -> subprocess.Popen[str]:
        arguments = ("-m", _PROGRAM, str(rank), str(self.degree), str(port))
        return subprocess.Popen(
            bound_to_parent(sys.executable, *arguments),
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C at a terminal is for rank 0, which lets streams finish
            env={**os.environ, "LOCAL_RANK": str(rank)},
        )

    @property
    def pids(self) -> Sequence[int]:
        """Of the others."""
        return [process.pid for process in self._processes]

    def begin(self, settings: RankSettings) -> None:
        """Has the others load their shares, and meets them. To be followed by loading this
        one's.
        """
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # `lost` tells of it
                process.stdin.write(settings.to_json() + "\n")
                process.stdin.flush()
        assert self._listener is not None, "a group begins once"
        port = self._listener.getsockname()[1]
        listener, self._listener = self._listener, None
        channel.join(0, self.degree, port, self.device, listening_fd=listener.detach())

    def share(self, pool: KvPool) -> None:
        """Has the others keep their shares of the KV in this pool, of as many blocks."""
        channel.tell(np.array([pool.num_blocks, -1 if pool.fd is None else pool.fd]))
        if pool.fd is None:
            pool.shares = gpu_shares.exchange(pool.buffer)

    def tell(self, numbers: Numbers) -> None:
        """Sends numbers to all others, each of which has to `channel.hear` them."""
        channel.tell(numbers)

    def fail(self, why: str) -> None:
        """No step can be run any more."""
        self._broken = why

    def lost(self) -> str:
        """Which rank has ended and how, or what else is wrong; nothing while steps can be run."""
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"rank {rank} of {self.degree} (process {process.pid}) ended with {how}"
        return self._broken

    def kill(self) -> None:
        """Ends the others, which keep nothing that would be lost. A step that runs fails or waits
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
        """Ends the group; no step may run. Safe to call twice."""
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
