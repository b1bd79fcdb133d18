from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvrelay.embedded_redis import EmbeddedRedis
from kvrelay.registry import Registry


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with EmbeddedRedis() as server, await Registry.connect(server.url) as connected:
        yield connected
