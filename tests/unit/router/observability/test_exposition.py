"""What /metrics says, by a real scrape of a router with workers; the dashboard asks for nothing
else.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.router_harness import running_router

from kvrelay.client import AsyncClient
from kvrelay.errors import NotFound

FOLDER = Path(__file__).resolve().parents[4] / "k8s"
DASHBOARD = json.loads((FOLDER / "base" / "grafana-dashboard.json").read_text())
KEDA = list(yaml.safe_load_all((FOLDER / "components" / "keda" / "scaled-object.yaml").read_text()))
CONTRACT = {
    "num_requests_running": {"pool", "worker", "model_name"},
    "num_requests_waiting": {"pool", "worker", "model_name"},
    "num_requests_waiting_for_prefill": {"pool", "worker", "model_name"},
    "num_requests_waiting_at_limit": {"pool", "worker", "model_name"},
    "kv_cache_usage_perc": {"pool", "worker", "model_name"},
    "num_preemptions_total": {"pool", "worker", "model_name"},
    "prefix_cache_queries_total": {"model_name"},
    "prefix_cache_hits_total": {"model_name"},
    "prompt_tokens_total": {"model_name"},
    "generation_tokens_total": {"model_name"},
    "request_success_total": {"model_name", "finished_reason"},
    "path_decision_total": {"model_name", "path", "why"},
    "handoff_bytes_total": {"model_name"},
    "pool_replicas": {"pool", "state", "model_name"},
    "scaling_decision_total": {"model_name", "pool", "direction"},
} | {
    f"{name}_seconds_bucket": {"model_name", "le"}
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "request_time_per_output_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_handoff_time",
        "request_decode_time",
        "second_token_gap",
        "handoff",
    )
}
Samples = dict[str, list[tuple[dict[str, str], float]]]


async def scrape() -> Samples:
    """After one disaggregated answer of 4 tokens."""
    async with (
        running_router() as router,
        AsyncClient(router.grpc) as client,
        httpx.AsyncClient() as http,
    ):
        answer = await client.generate(
            token_ids=range(20, 60), max_tokens=4, ignore_eos=True
        ).result()
        assert answer.path == "disaggregated"
        with pytest.raises(NotFound):
            await client.generate("p", model="another").result()
        while not router.registry.published:
            await asyncio.sleep(0.01)
        text = (await http.get(f"{router.http}/metrics")).text
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


@pytest.fixture(scope="module")
def samples() -> Samples:
    return asyncio.run(scrape())


def value(samples: Samples, name: str, **labels: str) -> float:
    (found,) = [
        number
        for have, number in samples[f"kvrelay_{name}"]
        if all(have[one] == labels[one] for one in labels)
    ]
    return found


@pytest.mark.parametrize(("name", "labels"), CONTRACT.items(), ids=CONTRACT.keys())
def test_every_series_of_the_contract_is_there(
    samples: Samples, name: str, labels: set[str]
) -> None:
    assert {frozenset(have) for have, _ in samples[f"kvrelay_{name}"]} == {frozenset(labels)}


def test_one_answer_is_counted_once(samples: Samples) -> None:
    assert value(samples, "generation_tokens_total") == 4
    assert (
        value(samples, "prompt_tokens_total") == value(samples, "prefix_cache_queries_total") == 40
    )
    assert value(samples, "request_success_total", finished_reason="length") == 1
    assert value(samples, "request_success_total", finished_reason="stop") == 0
    assert value(samples, "time_to_first_token_seconds_count") == 1
    assert value(samples, "inter_token_latency_seconds_count") == 3
    assert value(samples, "handoff_seconds_count") == 1
    assert value(samples, "path_decision_total", path="disaggregated") == 1


def test_a_state_without_workers_is_zero(samples: Samples) -> None:
    assert value(samples, "pool_replicas", pool="decode", state="ready") == 1
    assert value(samples, "pool_replicas", pool="decode", state="draining") == 0


def test_buckets_are_cumulative_and_end_with_all(samples: Samples) -> None:
    for name in (
        name for name in samples if name.startswith("kvrelay_") and name.endswith("_bucket")
    ):
        counts = [number for _, number in samples[name]]
        assert counts == sorted(counts), name
        assert samples[name][-1][0]["le"] == "+Inf"
        assert counts[-1] == samples[name.replace("_bucket", "_count")][0][1]


def expressions(node: Any = DASHBOARD) -> Iterator[str]:
    if isinstance(node, dict):
        if "expr" in node:
            yield node["expr"]
        for one in node.values():
            yield from expressions(one)
    elif isinstance(node, list):
        for one in node:
            yield from expressions(one)


ASKED = {
    *expressions(),
    *(one["metadata"]["query"] for scaled in KEDA for one in scaled["spec"]["triggers"]),
}


@pytest.mark.parametrize("expression", sorted(ASKED))
def test_the_dashboard_and_keda_ask_for_what_is_there(samples: Samples, expression: str) -> None:
    asked = re.findall(r"(kvrelay_\w+)\{([^}]*)\}", expression)
    assert len(asked) == expression.count("kvrelay_") > 0
    grouped = {
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    for name, matchers in asked:
        labels = set(samples[name][0][0])
        assert {one.split("=")[0].strip() for one in matchers.split(",")} <= labels
        assert grouped <= labels


def test_the_dashboards_objectives_are_ends_of_buckets(samples: Samples) -> None:
    series = {
        "ttft_slo": "time_to_first_token_seconds",
        "tpot_slo": "request_time_per_output_token_seconds",
    }
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    for variable, name in series.items():
        ends = {have["le"] for have, _ in samples[f"kvrelay_{name}_bucket"]}
        assert set(variables[variable]["query"].split(",")) <= ends
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {
        "__rate_interval",
        "__interval",
        "__all",
    }
    assert used == set(variables)
