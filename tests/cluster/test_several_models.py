"""A cluster of several models, end to end: answers, a death, and a model that nobody uses."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import save_adapter
from support.cluster_status import first_status
from support.running_cluster import ANY_PORT, RunningCluster, running_on
from support.tiny_models import build
from transformers import AutoModelForCausalLM

from kvrelay.client.answer import Completion
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import FailedPrecondition
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


@pytest.mark.long
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


@pytest.mark.long
async def test_models_with_the_same_files_stay_apart(tmp_path: Path) -> None:
    """Two entries with one folder, and one with a copy: they have the same fingerprint."""
    folder = build("llama", tmp_path / "llama")
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    config = ClusterConfig.model_validate(
        {
            "listen": ANY_PORT,
            "model": {"dtype": "float32"},
            "kv": {"memory": "16MiB", "block_size": 16},
            "models": {
                name: {
                    "model": {"path": str(path)},
                    "prefill": {"replicas": 0},
                    "decode": {"replicas": int(name != "asleep"), "chunk_tokens": 64},
                    "autoscaling": str(policy) if name == "asleep" else None,
                }
                for name, path in (("one", folder), ("other", copied), ("asleep", folder))
            },
        }
    )
    adapter = save_adapter(tmp_path / "lora", folder)
    expected = reference(folder)
    async with running_on(config) as cluster:

        async def ask(model: str, **more: Any) -> Completion:
            return await cluster.client.generate(
                token_ids=PROMPT, model=model, **GREEDY, **more
            ).result()

        first, again, other = await ask("one"), await ask("one"), await ask("other")
        assert first.token_ids == again.token_ids == other.token_ids == expected
        assert first.system_fingerprint == other.system_fingerprint
        cached = [one.usage.cached_tokens for one in (first, again, other)]
        assert cached == [0, 96, 0], "each model has a prefix cache of its own"

        # An adapter is one model's alone, though its files fit all of them.
        for name in ("one", "asleep"):
            loaded = await cluster.admin.LoadAdapter(
                pb.LoadAdapterRequest(name=f"lora-{name}", path=str(adapter), model=name)
            )
            assert (loaded.adapter.model, loaded.adapter.served) == (name, True)
        answers = {name: await ask(name) for name in ("lora-one", "lora-asleep")}
        (changed,) = {one.token_ids for one in answers.values()}
        assert changed != expected
        listed = (await cluster.admin.ListAdapters(pb.ListAdaptersRequest())).adapters
        assert {(one.name, one.model, one.workers) for one in listed} == {
            ("lora-one", "one", 1),
            ("lora-asleep", "asleep", 1),
        }
        (worker,) = (await status_of(cluster, "other")).pools[1].workers
        assert worker.worker_id == "other.decode-0"
        assert (await ask("other")).token_ids == expected

        # Tokens of one go on at the other, since the weights are the same; those of an adapter not.
        resumed = await ask(
            "other", resume=expected[:9], system_fingerprint=first.system_fingerprint
        )
        assert resumed.token_ids[-71:] == expected[9:]
        with pytest.raises(FailedPrecondition, match="the tokens in resume are from version"):
            await ask(
                "other",
                resume=changed[:9],
                system_fingerprint=answers["lora-one"].system_fingerprint,
            )

        # The death of one model's worker is no attempt of the other's stream.
        (doomed,) = (await status_of(cluster, "one")).pools[1].workers
        stream = cluster.client.generate(token_ids=PROMPT, model="other", **GREEDY)
        await anext(stream)
        os.kill(doomed.pid, signal.SIGKILL)
        done = await stream.result()
        assert done.token_ids == expected
        assert done.ledger is not None
        assert len(done.ledger.attempts) == 1
        assert (await ask("lora-one")).token_ids == changed
