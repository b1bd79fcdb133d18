"""One fleet for all rows of a session: what a row kills is replaced before the next one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from faults.fleet import Fleet, running_fleet
from faults.fleet_worker import Forks
from faults.launcher import FleetLauncher, actuated


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def forks() -> AsyncIterator[Forks]:
    async with Forks() as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(forks: Forks) -> AsyncIterator[Fleet]:
    async with running_fleet(forks) as running:
        yield running
        await running.complete()
        for worker in running.alive:
            sample = await worker.sample()
            assert sample.at_rest, sample
            assert not sample.integrity_error, sample


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def launcher(fleet: Fleet) -> AsyncIterator[FleetLauncher]:
    """The fleet under an actuator."""
    async with actuated(fleet) as launching:
        yield launching
