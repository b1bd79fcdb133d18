from __future__ import annotations

import subprocess
import sys

import pytest

from kv_transfer.choice import choose_transport, host_id
from kvrelay.errors import Unimplemented


@pytest.mark.parametrize(
    ("same_process", "same_host", "device", "expected"),
    [
        (True, True, "cpu", ("memory", "same process")),
        (False, True, "cpu", ("shm", "same host")),
        (False, False, "cpu", ("grpc", "another host")),
        (False, True, "cuda", ("grpc", "arena on cuda")),
    ],
)
def test_auto_takes_the_fewest_copies(
    same_process: bool, same_host: bool, device: str, expected: tuple[str, str]
) -> None:
    choice = choose_transport("auto", same_process=same_process, same_host=same_host, device=device)
    assert choice == expected


@pytest.mark.parametrize(
    ("requested", "device", "says"),
    [
        ("memory", "cpu", "not in one process"),
        ("shm", "cpu", "not on one host"),
        ("nccl", "cpu", "not on a GPU"),
        ("gloo", "cuda", "not in the host's memory"),
        ("nixl", "cpu", "not one of auto, memory, shm, grpc, gloo, nccl"),
    ],
)
def test_what_was_asked_for_and_cannot_work_is_an_error(requested: str, device: str, says: str) -> None:
    with pytest.raises(Unimplemented, match=says):
        choose_transport(requested, same_process=False, same_host=False, device=device)


def test_what_was_asked_for_is_taken_if_it_can_work() -> None:
    for name in ("memory", "shm", "grpc", "gloo"):
        assert choose_transport(name, same_process=True, same_host=True, device="cpu") == (name, "asked for")


def test_host_id_is_the_same_in_every_process_of_a_host() -> None:
    code = "from kv_transfer.choice import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id()
