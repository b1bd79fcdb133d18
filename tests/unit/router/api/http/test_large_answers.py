"""An answer of many parts is one body for the client."""

from __future__ import annotations

import httpx
import pytest

from router.api.http.connections.sending import _ONE_PART_BYTES, JsonParts


@pytest.mark.parametrize("size", [1, _ONE_PART_BYTES // 8, _ONE_PART_BYTES])
async def test_parts_are_one_body(size: int) -> None:
    parts = [b'["', *(bytes([97 + number]) * size for number in range(8)), b'"]']
    app = JsonParts(parts, {"x-kvrelay-path": "local"})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        response = await http.get("/")
    assert response.content == b"".join(parts)
    assert response.headers["content-length"] == str(len(response.content))
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-kvrelay-path"] == "local"
