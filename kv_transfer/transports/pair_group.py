"""A torch.distributed group of one sender and one receiver, by which gloo and nccl move tensors.

torch.distributed neither authenticates nor encrypts; these transports are for a private network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from kv_transfer.transports import gloo, nccl
from kvrelay.errors import FailedPrecondition, Unavailable

SENDER, RECEIVER = 0, 1
# Idle groups that each side keeps. A peer that died leaves its group behind.
MAX_IDLE = 64
_PORT = re.compile(r"[0-9]{1,5}")


@contextmanager
def _lost_peer() -> Iterator[None]:
    """Raises Unavailable for a RuntimeError, by which torch.distributed reports every error with a
    peer.
    """
    try:
        yield
    except RuntimeError as error:
        # Without the location in PyTorch's source.
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        raise Unavailable(f"the process group with the peer failed: {reason}") from error


def _parse(rendezvous: str) -> tuple[str, int, str]:
    """Splits HOST:PORT/NAME into its parts. Raises FailedPrecondition for any other form."""
    address, _, name = rendezvous.rpartition("/")
    host, _, port = address.rpartition(":")
    if not (host and name and _PORT.fullmatch(port) and int(port) < 2**16):
        raise FailedPrecondition(f"rendezvous {rendezvous!r:.200} is not HOST:PORT/NAME")
    return host, int(port), name


def open_store(host: str, port: int, timeout: timedelta, listening_fd: int | None = None) -> Store:
    """The rendezvous store of two ranks: the server behind `listening_fd`, or a client of it.
    Raises Unavailable.
    """
    with _lost_peer():
        store: Store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=listening_fd is not None,
            master_listen_fd=listening_fd,
            wait_for_workers=False,
            timeout=timeout,
        )
    return store


class PairGroup:
    """A group of one sender and one receiver. Only one push uses it at a time, so pushes cannot
    interfere.
    """

    def __init__(
        self, backend: str, rendezvous: str, rank: int, host: str, timeout_s: float
    ) -> None:
        self.rendezvous = rendezvous
        self._backend = backend
        self._rank = rank
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        # The send under way.
        self._sending: Any = None

    def join(self, store: Store | None) -> None:
        """Waits for the other rank, which must be joining too.

        `store` is the sender's own. The receiver passes None and connects to the sender's store.
        """
        if self._group is not None:
            return
        host, port, name = _parse(self.rendezvous)
        make = gloo.make_group if self._backend == "gloo" else nccl.make_group
        with _lost_peer():
            if store is None:
                store = open_store(host, port, self._timeout)
            self._group = make(PrefixStore(name, store), self._rank, self._host, self._timeout)

    def send(self, data: torch.Tensor) -> None:
        """Starts to send `data` after the previous send has completed. Raises Unavailable."""
        with _lost_peer():
            if self._sending is not None:
                self._sending.wait(self._timeout)
            self._sending = self._group.send([data], RECEIVER, 0)

    def receive(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Waits for the next tensor: `num_bytes` of uint8 on `device`. Raises Unavailable."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        with _lost_peer():
            self._group.recv([data], SENDER, 0).wait(self._timeout)
        return data

    def close(self) -> None:
        """Aborts the group. Safe to call twice."""
        if self._group is not None:
            self._group.abort()
            self._group = None
