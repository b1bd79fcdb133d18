from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with EmbeddedRedis() as server, await Registry.connect(server.url) as connected:
        yield connected
