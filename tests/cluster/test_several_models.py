"""A cluster of several models, end to end: answers, a death, and a model that nobody uses."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from support.cluster_status import first_status
from support.running_cluster import ANY_PORT, RunningCluster, running_on
from support.tiny_models import build
from transformers import AutoModelForCausalLM

from kvrelay.config.schema import ClusterConfig
from kvrelay.wire.cluster import ClusterStatus, cluster_status_from_proto, pb

pytestmark = [pytest.mark.timeout(240)]

PROMPT = [2 + (7 * i) % 90 for i in range(100)]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 80}
POLICY = """\
interval_s: 0.2
decode:
  min_replicas: 0
  metrics: [{name: queue_depth, target: 4}]
  downscale_delay_s: 2
"""


async def status_of(cluster: RunningCluster, model: str) -> ClusterStatus:
    request = pb.GetStatusRequest(model=model)
    return cluster_status_from_proto(await cluster.admin.GetStatus(request))


async def tokens_of(cluster: RunningCluster, model: str) -> tuple[int, ...]:
    done = await cluster.client.generate(token_ids=PROMPT, model=model, **GREEDY).result()
    return done.token_ids


def reference(folder: Path) -> tuple[int, ...]:
    """The tokens that transformers generates."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=80, do_sample=False, eos_token_id=None
    )
    return tuple(found[0, len(PROMPT) :].tolist())


def decode_workers(status: ClusterStatus) -> int:
    return len(status.pools[1].workers)


async def test_models_answer_die_and_sleep_apart(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    folders = {name: build(name, tmp_path / name) for name in ("llama", "qwen3", "gpt2")}
    config = ClusterConfig.model_validate(
        {
            "listen": ANY_PORT,
            "models": {
                name: {
                    "model": {"path": str(folder), "dtype": "float32"},
                    "kv": {"memory": "16MiB", "block_size": 16},
                    "prefill": {"replicas": int(name == "llama"), "chunk_tokens": 64},
                    "decode": {"replicas": int(name != "gpt2"), "chunk_tokens": 64},
                    "autoscaling": str(policy) if name == "gpt2" else None,
                }
                for name, folder in folders.items()
            },
        }
    )
    expected = {name: reference(folder) for name, folder in folders.items()}
    assert len(set(expected.values())) == 3
    async with running_on(config) as cluster:
        answers = {name: await tokens_of(cluster, name) for name in ("llama", "qwen3")}
        assert decode_workers(await status_of(cluster, "gpt2")) == 0
        answers["gpt2"] = await tokens_of(cluster, "gpt2")
        assert answers == expected

        # A worker of one model dies under streams of both.
        (doomed,) = (await status_of(cluster, "qwen3")).pools[1].workers
        assert doomed.worker_id == "qwen3.decode-0"
        streams = {
            name: cluster.client.generate(token_ids=PROMPT, model=name, **GREEDY)
            for name in ("llama", "qwen3")
        }
        for stream in streams.values():
            await anext(stream)
        os.kill(doomed.pid, signal.SIGKILL)
        done = {name: await stream.result() for name, stream in streams.items()}
        assert {name: one.token_ids for name, one in done.items()} == {
            name: expected[name] for name in streams
        }
        ledger = done["llama"].ledger
        assert ledger is not None
        assert len(ledger.attempts) == 1, "the death of another model's worker is not its own"

        await first_status(
            lambda: status_of(cluster, "gpt2"),
            lambda status: decode_workers(status) == 0,
            "the model that nobody uses sleeps",
            60,
        )
        again = await asyncio.gather(*(tokens_of(cluster, name) for name in folders))
        assert dict(zip(folders, again, strict=True)) == expected
