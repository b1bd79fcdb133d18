"""Three hosts, of which one is lost under load; `benchmarks/hosts.py` is the long version and says
how.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from support import host_namespaces

_COMMAND = Path(__file__).parents[2] / "benchmarks" / "hosts.py"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


async def test_two_pools_on_three_hosts_survive_the_loss_of_one(tmp_path: Path) -> None:
    if why := host_namespaces.missing():
        pytest.skip(f"hosts in namespaces: {why}")
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            str(_COMMAND),
            "--requests",
            "12",
            "--length",
            "60",
            "--json",
            str(report),
        ),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode(errors="replace")
    found = json.loads(report.read_text())
    assert found["failed"] == []
    assert not found["wrong"]
    assert found["requests"] >= 12
    assert found["moved"] >= 1, "the host that was lost had no streams"

    each = found["spread"]
    assert len(each["prefill"]) == len(set(each["prefill"])) == 2
    assert len(each["decode"]) == len(set(each["decode"])) == 2
    assert len({*each["prefill"], *each["decode"]}) == 3
    assert set(found["handoffs"]) == {"grpc"}

    (lost,), (after,), (joined,) = found["lost"], found["spread_after"], found["joined"]
    left = {*each["prefill"], *each["decode"]} - {lost}
    assert set(after["prefill"]) == set(after["decode"]) == left
    assert "has room for 1 logical CPU" in found["waited"][0]
    assert joined not in {lost, *left}
