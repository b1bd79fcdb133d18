from __future__ import annotations

import subprocess
import sys

import pytest

from kv_transfer.transport_selection import choose_transport, host_id
from kvrelay.errors import Unimplemented


def choose(
    requested: str, device: str, target_device: str, *, same_process: bool, same_host: bool
) -> tuple[str, str]:
    return choose_transport(
        requested,
        same_process=same_process,
        same_host=same_host,
        device=device,
        target_device=target_device,
    )


@pytest.mark.parametrize(
    ("same_process", "same_host", "devices", "expected"),
    [
        (True, True, ("cpu", "cpu"), ("memory", "same process")),
        (False, True, ("cpu", "cpu"), ("shm", "same host")),
        (False, True, ("cpu", "cuda"), ("shm", "same host")),
        (False, False, ("cpu", "cpu"), ("grpc", "another host")),
        (False, True, ("cuda", "cuda"), ("cuda_ipc", "GPUs of one host")),
        (False, False, ("cuda", "cuda"), ("grpc", "another host")),
        (True, True, ("cuda", "cuda"), ("grpc", "arena on cuda")),
        (False, True, ("cuda", "cpu"), ("grpc", "arena on cuda")),
    ],
)
def test_auto_takes_the_fewest_copies(
    same_process: bool, same_host: bool, devices: tuple[str, str], expected: tuple[str, str]
) -> None:
    assert choose("auto", *devices, same_process=same_process, same_host=same_host) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_between_hosts_is_grpc_and_under_tls_it_says_so(device: str) -> None:
    """What torch.distributed and NIXL carry is neither authenticated nor encrypted: these have to
    be asked for.
    """
    for target in ("cpu", "cuda"):
        found = choose_transport(
            "auto",
            same_process=False,
            same_host=False,
            device=device,
            target_device=target,
            tls=True,
        )
        assert found == ("grpc", "another host, by TLS")


@pytest.mark.parametrize(
    ("requested", "devices", "says"),
    [
        ("memory", ("cpu", "cpu"), "not in one process"),
        ("shm", ("cpu", "cpu"), "not on one host"),
        ("cuda_ipc", ("cuda", "cuda"), "not on one host"),
        ("nccl", ("cpu", "cpu"), "each must be one GPU"),
        ("nccl", ("cuda", "cpu"), "lies on cuda and goes to cpu"),
        ("gloo", ("cuda", "cuda"), "not in the host's memory"),
        (
            "pigeon",
            ("cpu", "cpu"),
            "allowed are auto, memory, shm, cuda_ipc, grpc, gloo, nccl, nixl",
        ),
    ],
)
def test_what_was_asked_for_and_cannot_work_is_an_error(
    requested: str, devices: tuple[str, str], says: str
) -> None:
    with pytest.raises(Unimplemented, match=says):
        choose(requested, *devices, same_process=False, same_host=False)


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_gpu_memory_is_shared_between_gpus_only(devices: tuple[str, str]) -> None:
    with pytest.raises(Unimplemented, match="each must be one GPU"):
        choose("cuda_ipc", *devices, same_process=False, same_host=True)


def test_gpu_memory_is_not_shared_with_its_own_process() -> None:
    with pytest.raises(Unimplemented, match="process that it belongs to"):
        choose("cuda_ipc", "cuda", "cuda", same_process=True, same_host=True)


def test_what_was_asked_for_is_taken_if_it_can_work() -> None:
    for name in ("memory", "shm", "grpc", "gloo", "nixl"):
        assert choose(name, "cpu", "cpu", same_process=True, same_host=True) == (name, "asked for")
    for name in ("cuda_ipc", "grpc", "nccl", "nixl"):
        assert choose(name, "cuda", "cuda", same_process=False, same_host=True) == (
            name,
            "asked for",
        )


def test_host_id_is_the_same_in_every_process_of_a_host() -> None:
    code = "from kv_transfer.transport_selection import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id()
