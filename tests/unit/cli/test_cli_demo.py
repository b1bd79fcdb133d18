"""What `kvrelay demo` prints."""

from __future__ import annotations

import pytest
from support.scripted_router import ScriptedRouter, serving

from kvrelay.cli.demo import _stream
from kvrelay.cli.views.render import console
from kvrelay.client import AsyncClient


async def test_prompt_and_answer_are_told_apart_without_colours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(ScriptedRouter()) as target:
        async with AsyncClient(target) as client:
            await _stream(client, console(), "a title", "Once", prompt="Once")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("a title ")
    assert lines[1:4] == ["prompt:", "Once", "answer:"]
    assert lines[4].startswith("t100 t101")
