"""The processes of a router that end for good, one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.launch.router_group import RouterGroup


class Process:
    """Stands for a ChildSupervisor."""

    def __init__(self) -> None:
        self.given_up = asyncio.Event()

    async def end(self) -> KvRelayError:
        await self.given_up.wait()
        return Unavailable(f"process {id(self)}")


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_it_ends_with_the_last_of_them(size: int) -> None:
    config = ClusterConfig.model_validate({"router": {"processes": size}})
    nobody: Any = None
    group = RouterGroup(config, nobody)
    assert group.size == size
    processes = [Process() for _ in range(size)]
    group._processes = processes  # type: ignore[assignment]
    with capture_logs() as logged:
        end = asyncio.create_task(group.end())
        for number in reversed(range(size)):
            assert not end.done()
            processes[number].given_up.set()
            for _ in range(5):
                await asyncio.sleep(0)
    assert (await end).message == f"process {id(processes[0])}"
    given_up = [(one["router_process"], one["left"]) for one in logged]
    assert given_up == [(number, number) for number in reversed(range(1, size))]
