"""A load that steps up and down again: the pool that it is for follows, the other one does not, and
no request notices.

`python benchmarks/elastic.py` is the long version, with a shipped policy.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from elastic import CASES, Steps, run_case, running
from step_verdict import verdict

from kvrelay.config.config_file import load_policy
from kvrelay.loadtest.html_report import page
from kvrelay.loadtest.recording import moments_of

POLICY = """
interval_s: 0.25
prefill:
  max_replicas: 2
  metrics: [{name: queue_depth, target: 4}, {name: queue_tokens, target: 8192}]
  upscale_delay_s: 1
  downscale_delay_s: 2
decode:
  max_replicas: 2
  metrics: [{name: queue_depth, target: 4}, {name: kv_occupancy, target: 0.8}]
  upscale_delay_s: 1
  downscale_delay_s: 2
"""
STEPS = Steps(calm_s=4, high_s=7, tail_s=120)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


async def test_each_pool_follows_its_own_load_alone(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    rules = load_policy(policy)
    async with running(policy) as cluster:
        for case in CASES:
            report = await run_case(cluster, case, STEPS, seed=0)
            findings = verdict(report, rules, case.pool, STEPS.calm_s, STEPS.calm_s + STEPS.high_s)
            assert not [one for one in findings if not one.holds], findings
            assert {row.output_tokens for row in report.rows} == {case.output_tokens}

            told = re.search(
                r'<script type="application/json" '
                r'id="data">(.*?)</script>',
                page(report),
                re.DOTALL,
            )
            assert told is not None
            (shown,) = json.loads(told[1])["runs"]
            assert [one["pool"] for one in shown["timeline"]["decisions"]] == [case.pool, case.pool]
            reasons = [one["reason"] for one in shown["timeline"]["decisions"]]
            assert all(re.match("queue_depth|queue_tokens|kv_occupancy", one) for one in reasons), (
                reasons
            )
            seen = [moment.pools[case.pool].metrics for moment in moments_of(report)]
            assert any(one["queue_depth"] > 4 or one["kv_occupancy"] > 0.8 for one in seen), (
                "what the pool grew for"
            )
