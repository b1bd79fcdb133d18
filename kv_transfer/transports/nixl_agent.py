"""A NIXL agent, through which one process reads another's memory
(https://github.com/ai-dynamo/nixl). Slow calls, for worker threads; all methods are thread-safe.
"""

from __future__ import annotations

import importlib
import ipaddress
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.blocks.plan import Copy
from kvrelay.errors import KvRelayError, Unavailable, Unimplemented

# Polling interval in seconds. NIXL does not report the end of a read, so it is polled.
_POLL_S = 100e-6
# Longest sleep of NIXL's own thread, in microseconds. Without a limit the thread would spin.
_PROGRESS_US = 1000


class NixlAgent:
    """A NIXL agent with a unique name. With `serves`, NIXL runs a thread, without which peers
    cannot read.

    UCX, which moves the bytes, listens on a TCP port of its choice. It listens on the loopback
    device if `host` is a loopback address, otherwise on the devices in UCX_NET_DEVICES, or on all
    devices. Raises Unimplemented if NIXL is missing.
    """

    def __init__(self, name: str, host: str, *, serves: bool) -> None:
        self._nixl = _bindings()
        self._errors = tuple(value for value in vars(self._nixl).values() if _is_error(value))
        self._lock = threading.Lock()
        # Abandoned reads, and the memory that they may still write to.
        self._given_up: list[tuple[int | None, torch.Tensor]] = []
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _PROGRESS_US
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        with self._failing(Unimplemented, "NIXL does not start here"):
            self._agent = self._nixl.nixlAgent(name, config)
            # UCX settings in the environment take precedence.
            self._agent.createBackend(
                "UCX", {"engine_config": "NET_DEVICES=lo"} if _is_loopback(host) else {}
            )

    def register(self, memory: torch.Tensor) -> None:
        """Registers `memory`, on the host or a GPU: peers may read it, and this agent may write to
        it when it reads from a peer.
        """
        with self._failing(Unimplemented, f"NIXL takes no memory on {memory.device}"):
            self._agent.registerMem(self._regions(memory), [])

    def deregister(self, memory: torch.Tensor) -> None:
        """Ends the registration of memory that no read uses."""
        with suppress(*self._errors):
            self._agent.deregisterMem(self._regions(memory), [])

    def metadata(self) -> bytes:
        """The description that a peer needs to read the registered memory."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def add_peer(self, metadata: bytes) -> str:
        """Adds a peer and returns its name. Raises Unimplemented for metadata that this version of
        NIXL cannot use.
        """
        with self._failing(Unimplemented, "the sender's NIXL is not one that mine can read from"):
            name: bytes = self._agent.loadRemoteMD(metadata)
            return name.decode()

    def drop_peer(self, name: str) -> None:
        """Ends the connection, if there is one."""
        with suppress(*self._errors):
            self._agent.invalidateRemoteMD(name)

    def read(
        self,
        peer: str,
        start: int,
        device: int,
        target: torch.Tensor,
        copies: Sequence[Copy],
        timeout_s: float,
    ) -> None:
        """Copies from the peer's memory at address `start`, on its GPU `device`, or on its host if
        `device` is -1.

        Raises Unavailable if the peer is gone, or has not delivered in `timeout_s` seconds. The
        agent then owns `target`, which may still be written to.
        """
        self._let_go()
        request: int | None = None
        try:
            with self._failing(Unavailable, "the sender's memory cannot be read"):
                request = self._request(peer, start, device, target, copies)
                self._finish(request, timeout_s)
        except Unavailable:
            with self._lock:
                self._given_up.append((request, target))
            raise

    def _request(
        self, peer: str, start: int, device: int, target: torch.Tensor, copies: Sequence[Copy]
    ) -> int:
        numbers = np.array(copies, dtype=np.uint64).reshape(-1, 3)
        lengths = numbers[:, 2]
        sources = self._pieces(numbers[:, 0] + np.uint64(start), lengths, device)
        targets = self._pieces(
            numbers[:, 1] + np.uint64(target.data_ptr()), lengths, target.get_device()
        )
        request: int = self._agent.createXferReq(
            self._nixl.NIXL_READ, targets, sources, peer, b"", []
        )
        return request

    def _finish(self, request: int, timeout_s: float) -> None:
        nixl, give_up = self._nixl, time.monotonic() + timeout_s
        state = self._agent.postXferReq(request, b"")
        while state == nixl.NIXL_IN_PROG and time.monotonic() < give_up:
            time.sleep(_POLL_S)
            state = self._agent.getXferStatus(request)
        if state != nixl.NIXL_SUCCESS:
            raise Unavailable(f"reading the sender's memory took longer than {timeout_s:g} s")
        self._agent.releaseXferReq(request)

    def _let_go(self) -> None:
        """Releases the targets of abandoned reads that have ended."""
        with self._lock:
            given_up, self._given_up = self._given_up, []
        for request, target in given_up:
            if request is not None and self._is_under_way(request):
                with self._lock:
                    self._given_up.append((request, target))
                continue
            if request is not None:
                with suppress(*self._errors):
                    self._agent.releaseXferReq(request)
            self.deregister(target)

    def _is_under_way(self, request: int) -> bool:
        try:
            return bool(self._agent.getXferStatus(request) != self._nixl.NIXL_SUCCESS)
        except self._errors:
            return False

    def _regions(self, memory: torch.Tensor) -> Any:
        kind, device = self._kind(memory.get_device())
        return self._nixl.nixlRegDList(
            kind, [(memory.data_ptr(), memory.numel() * memory.element_size(), device, "")]
        )

    def _pieces(
        self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64], device: int
    ) -> Any:
        kind, device = self._kind(device)
        rows = np.stack([addresses, lengths, np.full_like(lengths, device)], axis=1)
        return self._nixl.nixlXferDList(kind, rows)

    def _kind(self, device: int) -> tuple[Any, int]:
        """NIXL's memory kind and device number for a GPU, or for the host if `device` is -1."""
        return (self._nixl.DRAM_SEG, 0) if device < 0 else (self._nixl.VRAM_SEG, device)

    @contextmanager
    def _failing(self, error: type[KvRelayError], what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as reason:
            raise error(f"{what}: {reason}") from reason


def _bindings() -> Any:
    """The bindings of the NIXL build that fits torch's CUDA."""
    try:
        return importlib.import_module("nixl")._bindings
    except ImportError as error:
        raise Unimplemented(
            "transport nixl needs NIXL on both workers; run pip install '.[nixl]' in a clone of "
            "kvrelay, or set transfer.transport: auto"
        ) from error


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
