from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as c10d

from kv_transfer.transports import nccl
from kv_transfer.transports.interface import interface_of
from kvrelay.errors import Unavailable


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_interface_of_an_address(host: str) -> None:
    assert interface_of(host) == "lo"


@pytest.mark.parametrize("host", ["192.0.2.77", "[2001:db8::77]"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(Unavailable, match="no network interface of this machine has the address "):
        interface_of(host)


@pytest.mark.parametrize(("before", "after"), [(None, "=lo"), ("ib0", "ib0")])
def test_nccl_is_told_the_interface_unless_somebody_else_has(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def options() -> Any:
        raise Asked(os.environ["NCCL_SOCKET_IFNAME"])

    class Group:
        Options = staticmethod(options)

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    if before is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", before)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Group, raising=False)
    with pytest.raises(Asked, match=f"^{after}$"):
        nccl.make_group(HashStore(), 0, "127.0.0.1", timedelta(seconds=1))
