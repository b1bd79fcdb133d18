"""Transport selection for a push, with the reason."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from kvrelay.errors import Unimplemented

TRANSPORTS = ("memory", "shm", "cuda_ipc", "grpc", "gloo", "nccl", "nixl", "vllm-nixl")

# In the order in which `auto` tries them.
_ON_ONE_HOST = {"memory": "same process", "shm": "same host", "cuda_ipc": "GPUs of one host"}


def host_id() -> str:
    """An id that is equal in two processes if and only if each can see the other under /proc: same
    machine, same PID namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def missing_package(transport: str) -> str:
    """Says which package the transport needs, and how to install it; empty if it is there."""
    if transport not in ("nixl", "vllm-nixl") or find_spec("nixl") is not None:
        return ""
    return (
        f"{transport} needs the package nixl, which is not installed; run pip install '.[nixl]' in "
        "a clone of kvrelay"
    )


def choose_transport(
    requested: str,
    *,
    same_process: bool,
    same_host: bool,
    device: str,
    target_device: str,
    tls: bool = False,
    in_vllm: bool = False,
) -> tuple[str, str]:
    """Returns (transport, why). The devices are those of the sender's and the receiver's arena,
    from `arena.device_of`. in_vllm: whether the sender's KV lies in vLLM's memory, which only
    vllm-nixl hands over.

    `auto` takes the transport with the fewest copies. Between hosts it always takes grpc, the only
    transport that TLS protects. Raises Unimplemented if a transport that was requested by name
    cannot work between these two workers, since a silent fallback would hide that.
    """
    if in_vllm != (requested == "vllm-nixl") and requested in ("auto", *TRANSPORTS):
        raise Unimplemented(_other_engine(requested))
    if requested == "auto":
        for name, why in _ON_ONE_HOST.items():
            if not _obstacle(name, same_process, same_host, device, target_device):
                return name, why
        if same_host:
            return "grpc", f"arena on {device}"
        return "grpc", "another host, by TLS" if tls else "another host"
    if requested not in TRANSPORTS:
        raise Unimplemented(
            f"transport {requested!r} is unknown; allowed are auto, {', '.join(TRANSPORTS)}"
        )
    if obstacle := _obstacle(requested, same_process, same_host, device, target_device):
        raise Unimplemented(
            f"transport {requested} cannot be used: {obstacle}; set transfer.transport: auto "
            "to select a supported one"
        )
    return requested, "asked for"


def _other_engine(requested: str) -> str:
    """Why a worker does not hand its KV over by the transport."""
    if requested == "vllm-nixl":
        return (
            "transport vllm-nixl cannot be used: this worker was not started with it; set engine: "
            "vllm in both pools, and start the workers again after a change of transfer.transport"
        )
    return (
        f"transport {requested} cannot be used: this worker was started with vllm-nixl, and its KV "
        "lies in vLLM's memory; start the workers again after a change of transfer.transport"
    )


def _obstacle(
    name: str, same_process: bool, same_host: bool, device: str, target_device: str
) -> str:
    """The reason why the transport cannot work, or empty."""
    match name:
        case "memory" if not same_process:
            return "the two workers are not in one process"
        case "shm" | "cuda_ipc" if not same_host:
            return "the two workers are not on one host and in one PID namespace"
        case "memory" | "shm" | "gloo" if device != "cpu":
            return f"the KV lies on {device}, not in the host's memory"
        case "nccl" | "cuda_ipc" if (device, target_device) != ("cuda", "cuda"):
            return f"the KV lies on {device} and goes to {target_device}; each must be one GPU"
        case "nixl" if not {device, target_device} <= {"cpu", "cuda"}:
            return (
                f"the KV lies on {device} and goes to {target_device}; neither may be shared by "
                f"GPUs"
            )
        case "cuda_ipc" if same_process:
            return "CUDA does not share memory with the process that it belongs to"
    return ""
