"""GPU memory that another process of the host opens, by CUDA calls that torch does not export."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvrelay.errors import KvRelayError, Unavailable, Unimplemented

HANDLE_BYTES = 64  # cudaIpcMemHandle_t

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaMemory:
    """The memory of one GPU. Addresses are this process's. Each call makes this GPU the calling
    thread's current GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.version.cuda:
            raise Unimplemented(
                f"transport cuda_ipc needs KV on a GPU, not on {device}; set "
                "transfer.transport to shm or grpc"
            )
        self._device = device
        # torch has loaded both libraries, so their names suffice.
        self._runtime: Any = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p

    def export(self, address: int) -> tuple[bytes, int]:
        """The handle of the allocation that contains `address`, and the offset of `address` in it.
        torch subdivides allocations.

        Raises Unimplemented for memory that cannot be shared, for example torch's expandable
        segments.
        """
        handle, base, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
        self._select()
        error = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        if error:
            raise Unimplemented(f"cuMemGetAddressRange failed with CUDA error {error}")
        self._check(
            self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(base.value)),
            Unimplemented,
            "this GPU memory cannot be shared",
        )
        return bytes(handle.reserved), address - base.value

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation and returns its address. Each call needs a `close`.

        Raises Unimplemented if the allocation cannot be mapped, for example because the two GPUs
        cannot access each other.
        """
        address, content = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        self._select()
        self._check(
            self._runtime.cudaIpcOpenMemHandle(
                ctypes.byref(address), content, ctypes.c_uint(_LAZY_PEER_ACCESS)
            ),
            Unimplemented,
            "the sender's GPU memory cannot be opened",
        )
        assert address.value is not None, "CUDA maps nothing at address 0"
        return address.value

    def close(self, address: int) -> None:
        """Unmaps an allocation that `open` returned. Raises Unavailable."""
        self._select()
        self._check(
            self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address)),
            Unavailable,
            "the sender's GPU memory cannot be closed",
        )

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copies between addresses on the GPU, in the order of torch's current stream, without
        waiting. Raises Unavailable.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._select()
        self._check(
            self._runtime.cudaMemcpyAsync(
                ctypes.c_void_p(target),
                ctypes.c_void_p(source),
                ctypes.c_size_t(num_bytes),
                ctypes.c_int(_DEVICE_TO_DEVICE),
                ctypes.c_void_p(stream),
            ),
            Unavailable,
            "the sender's GPU memory cannot be read",
        )

    def settle(self) -> None:
        """Waits for the copies."""
        torch.cuda.current_stream(self._device).synchronize()

    def _select(self) -> None:
        self._check(
            self._runtime.cudaSetDevice(ctypes.c_int(self._device.index)),
            Unimplemented,
            f"no {self._device}",
        )

    def _check(self, code: int, error: type[KvRelayError], what: str) -> None:
        if code:
            # Clears the error, which torch would otherwise report as its own later.
            self._runtime.cudaGetLastError()
            reason = self._runtime.cudaGetErrorString(ctypes.c_int(code)).decode()
            raise error(f"{what}: {reason} (CUDA error {code})")
