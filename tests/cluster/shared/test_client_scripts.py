"""Two of the client scripts, with the installed versions of their libraries: the answers stay the
same when a decode worker is killed in the middle. `test_all_clients.py` runs every case of all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
from client_list import CLIENTS
from client_process import client_process
from support.running_cluster import RunningCluster
from worker_kill import ClusterWatch, run_with_kill

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
TRIES = 5


@pytest.mark.parametrize(
    ("name", "killed", "others"),
    [
        ("openai", ["tool loop, streamed", "parse"], ["parse with tools", "refusals"]),
        ("anthropic", ["tool loop, streamed", "parse with tools"], []),
    ],
)
@pytest.mark.sweep(2)
async def test_client(
    cluster: RunningCluster, tmp_path: Path, name: str, killed: list[str], others: list[str]
) -> None:
    url = cluster.local.endpoints.http
    python, log = Path(sys.executable), tmp_path / "log"
    async with (
        httpx.AsyncClient(base_url=url) as http,
        client_process(python, CLIENTS[name].path, url, "demo", log) as client,
    ):
        watch = ClusterWatch(http, cluster.admin)
        assert {*killed, *others} <= set(await client.cases())
        answers, tokens = {}, {}
        for case in (*killed, *others):
            before = await watch.tokens()
            found = await client.run(case, 120)
            assert not found.error
            answers[case], tokens[case] = found.answer, await watch.tokens() - before
        for case in killed:
            for number in range(TRIES):
                await cluster.settled()
                workers = await watch.idle(2)
                middle = tokens[case] // (2 + number)
                found, moved = await run_with_kill(client, case, watch, workers, middle, 120)
                assert (found.error, found.answer) == ("", answers[case])
                if moved:
                    break
            assert moved, "the fault happened"
    await cluster.settled()
