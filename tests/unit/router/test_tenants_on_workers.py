"""Tenants of a router with TLS and tokens over a real worker: what they do not share, and the
commands.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.certificates import made_by_the_command, tls_section
from support.router_harness import DEMO, router_before
from support.tokens import Tokens, bearer
from support.worker_harness import workers

from kvrelay.client import AsyncClient
from kvrelay.config.schema import ClusterConfig

PROMPT = (
    "Once upon a time there was a brave little fox named Ruby. She lived in a small house by the "
    "river. " * 4
)
OPTIONS = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@dataclass
class Cluster:
    grpc: str
    http: str
    admin: str
    ca: Path
    tokens: dict[str, str]
    files: dict[str, Path]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    certs = made_by_the_command(tmp_path / "certs")
    tokens = Tokens(tmp_path / "tokens.yaml")
    made = {name: tokens.add(name) for name in ("acme", "other")} | {
        "ops": tokens.add("ops", roles=["client", "admin"])
    }
    files = {name: tmp_path / f"{name}.token" for name in made}
    for name, token in made.items():
        files[name].write_text(token)

    config = ClusterConfig.model_validate(
        {
            "model": {"path": DEMO, "dtype": "float32"},
            "kv": {"memory": "32MiB"},
            "prefill": {"replicas": 0},
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
            "security": {"tls": tls_section(certs), "tokens_file": str(tokens.path)},
        }
    )
    async with (
        workers(Path(DEMO), config, "decode-0") as running,
        router_before(config, running.registry) as words,
    ):
        yield Cluster(words["grpc"], words["http"], words["admin"], certs / "ca.pem", made, files)


async def command(cluster: Cluster, tenant: str, *arguments: str) -> tuple[int, str]:
    """(exit code, all that it printed) of a command that shows the tenant's token."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KVRELAY_TOKEN_FILE": str(cluster.files[tenant]),
        "KVRELAY_TLS_CA": str(cluster.ca),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrelay.cli.main", *arguments),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode is not None
    return process.returncode, said


@pytest.mark.long
async def test_a_tenant_finds_its_own_prefixes_and_nobody_elses(cluster: Cluster) -> None:
    ca = cluster.ca.read_bytes()
    cached: list[tuple[str, bool]] = []
    answers = set()
    for name in ("acme", "acme", "other", "other", "acme"):
        async with AsyncClient(cluster.grpc, token=cluster.tokens[name], tls=ca) as client:
            answer = await client.generate(PROMPT, **OPTIONS)
        cached.append((name, answer.usage.cached_tokens > 0))
        answers.add(answer.token_ids)
    assert cached == [
        ("acme", False),
        ("acme", True),
        ("other", False),
        ("other", True),
        ("acme", True),
    ]
    assert len(answers) == 1

    # Users of one tenant who give a cache_salt share with those who give the same, at either
    # listener.
    asked = [
        ("acme", "ann"),
        ("acme", "ann"),
        ("acme", "bob"),
        ("other", "ann"),
        ("acme", None),
        ("acme", "bob"),
    ]
    cached = []
    for name, salt in asked:
        async with AsyncClient(cluster.grpc, token=cluster.tokens[name], tls=ca) as client:
            answer = await client.generate(PROMPT, **OPTIONS, cache_salt=salt)
        cached.append((f"{name}/{salt}", answer.usage.cached_tokens > 0))
        answers.add(answer.token_ids)
    assert cached == [
        ("acme/ann", False),
        ("acme/ann", True),
        ("acme/bob", False),
        ("other/ann", False),
        ("acme/None", True),
        ("acme/bob", True),
    ]
    assert len(answers) == 1

    trusted = ssl.create_default_context(cafile=cluster.ca)
    async with httpx.AsyncClient(base_url=cluster.http, verify=trusted, timeout=30) as http:
        assert cluster.http.startswith("https://")
        assert (await http.get("/metrics")).status_code == 401
        for salt, found in (("ann", True), ("eve", False)):
            body = {"prompt": PROMPT, **OPTIONS, "cache_salt": salt}
            said = await http.post(
                "/v1/completions", json=body, headers=bearer(cluster.tokens["acme"])
            )
            assert (said.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == found
        ours = (await http.get("/metrics", headers=bearer(cluster.tokens["ops"]))).text
        assert (
            "kvrelay_tenant_requests_total"
            '{finished_reason="length",model_name="demo",tenant="acme"} 10.0' in ours
        )

    load = (
        "--num-requests",
        "3",
        "--rate",
        "inf",
        "--prompt-tokens",
        "20",
        "--output-tokens",
        "4",
        "--allow-local",
    )
    for target in (cluster.grpc, cluster.http):
        code, said = await command(cluster, "ops", "loadtest", "run", "--target", target, *load)
        assert code == 0, said
        assert "3 of 3 requests answered" in said
    code, said = await command(cluster, "ops", "status", "--admin", cluster.admin, "--json")
    assert code == 0, said
    assert json.loads(said)["model"] == "demo"
    code, said = await command(cluster, "ops", "scale", "decode=1", "--admin", cluster.admin)
    assert (code, said) == (0, "prefill=0 decode=1\n")
    code, said = await command(cluster, "acme", "status", "--admin", cluster.admin)
    assert (code, said.count("\n")) == (1, 1)
    assert "tenant acme has the role client; this call requires admin" in said
    code, said = await command(
        cluster, "acme", "generate", "Once", "--target", cluster.grpc, "--max-tokens", "3"
    )
    assert code == 0, said
    assert not any(token in said for token in cluster.tokens.values())
