"""The build before versions and this one as router, prefill worker, decode worker, controller: each
combination.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from mixed_cluster import PRESENT, NoHistory, mixed_cluster, previous_tree

import kvrelay

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]
PROMPT = tuple(20 + number * 7 % 200 for number in range(150))
MAX_TOKENS = 24
BUILDS = ("previous", "present")
_answers: dict[str, tuple[int, ...]] = {}  # of the first combination, which all others have to give


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    try:
        return {"previous": previous_tree(tmp_path_factory.mktemp("previous")), "present": PRESENT}
    except NoHistory as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("router", "prefill", "decode", "controller"),
    list(product(BUILDS, repeat=4)),
    ids=lambda build: build,
)
async def test_each_combination_serves(
    router: str, prefill: str, decode: str, controller: str, trees: dict[str, Path], tmp_path: Path
) -> None:
    async with mixed_cluster(tmp_path, routers=1) as cluster:
        controlling = await cluster.controller(trees[controller], trees[prefill], trees[decode])
        await cluster.workers(2)
        routing = await cluster.router(trees[router])
        async with kvrelay.AsyncClient(f"127.0.0.1:{cluster.ports[0][0]}", timeout=120) as client:
            options = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 3}
            long = await client.generate(token_ids=PROMPT, temperature=0.0, **options)
            drawn = await client.generate(token_ids=PROMPT[1:], temperature=0.8, **options)
            short = await client.generate(token_ids=PROMPT[:8], temperature=0.0, **options)
            turn = (*PROMPT, *long.token_ids, *PROMPT[:70])  # whose beginning the decode worker has
            second = await client.generate(token_ids=turn, temperature=0.0, **options)
        paths = [one.path for one in (long, drawn, short, second)]
        assert paths == ["disaggregated", "disaggregated", "local", "disaggregated"]
        assert [len(one.ledger.attempts) for one in (long, drawn, short, second) if one.ledger] == [
            1,
            1,
            1,
            1,
        ]
        answers = {"long": long, "drawn": drawn, "short": short, "second": second}
        for name, answer in answers.items():
            assert _answers.setdefault(name, answer.token_ids) == answer.token_ids, name
        assert await routing.stop() == 0
        assert await controlling.stop() == 0
