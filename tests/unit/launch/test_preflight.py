"""Checks of a machine before a cluster starts on it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, MistralForCausalLM

from kv_transfer import transport_selection
from kv_transfer.transport_selection import TRANSPORTS, choose_transport
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, Unavailable, Unimplemented
from kvrelay.launch.checks import engine_check, preflight
from kvrelay.process.machine import Machine

FREE_PORTS = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"kv": {"memory": 1}},
            "1 bytes of a prefill worker do not hold one sequence .* which takes 10485760 bytes",
        ),
        (
            {"decode": {"kv": {"memory": 1}}, "model": {"max_model_len": 32}},
            "1 bytes of a decode worker do not hold one sequence .* which takes 81920 bytes",
        ),
        (
            {"prefill": {"replicas": 1024}, "decode": {"replicas": 1024}},
            "2048 workers are more than this machine can run; .* allow at most 8, .*; lower "
            "--prefill and --decode",
        ),
        (
            {"router": {"processes": 5}},
            "router.processes: 5 are more than this machine can run; .* allow at most 4, since ",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_starts(
    config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(Machine.here(), memory_bytes=2**30)
    monkeypatch.setattr(Machine, "here", lambda: machine)
    loaded = ClusterConfig.model_validate({"listen": FREE_PORTS, **config})
    with pytest.raises(ConfigError, match=words):
        preflight.check_machine(loaded, is_local=True)


@pytest.mark.long
@pytest.mark.parametrize(("window", "refused"), [(None, False), (64, True), (512, False)])
@pytest.mark.sweep(3)
def test_tokens_are_not_dropped_from_windows(
    window: int | None, refused: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    model = MistralConfig(**sizes, **heads, sliding_window=window)
    MistralForCausalLM(model).save_pretrained(tmp_path)
    config = ClusterConfig.model_validate(
        {
            "listen": FREE_PORTS,
            "model": {"path": str(tmp_path)},
            "kv": {"eviction": {"method": "window", "budget_tokens": 256}, "memory": "64MiB"},
        }
    )
    found = [one for one in preflight.machine_problems(config) if "eviction" in one]
    assert [one.partition(" (")[0] for one in found] == (
        ["kv.eviction: the model attends to the last tokens only in some layers"] if refused else []
    )


@pytest.mark.parametrize("gpus", [{}, {"prefill": 1}, {"decode": 1}, {"prefill": 1, "decode": 1}])
# vllm-nixl needs another engine, which the configuration checks.
@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS[:-1]])
def test_a_transport_that_no_handoff_could_use_is_refused(
    transport: str, gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_check_gpus", lambda config, machine: None)
    monkeypatch.setattr(transport_selection, "find_spec", lambda name: "installed")
    # flashinfer, too.
    monkeypatch.setattr(engine_check, "find_spec", lambda name: "installed")
    pools = {pool: {"resources": {"num_gpus": n}} for pool, n in gpus.items()}
    loaded = ClusterConfig.model_validate(
        {"listen": FREE_PORTS, "transfer": {"transport": transport}, **pools}
    )
    device, target = ("cuda" if pool in gpus else "cpu" for pool in ("prefill", "decode"))
    refused = ""
    try:
        choose_transport(
            transport, same_process=False, same_host=True, device=device, target_device=target
        )
    except Unimplemented as error:
        refused = error.message
    if not refused:
        preflight.check_machine(loaded, is_local=True)
        return
    with pytest.raises(ConfigError, match=f"transfer.transport: {re.escape(refused)}"):
        preflight.check_machine(loaded, is_local=True)


def test_nixl_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_selection, "find_spec", lambda name: None)
    asked = {"listen": FREE_PORTS, "transfer": {"transport": "nixl"}}
    with pytest.raises(ConfigError, match="needs the package nixl, which is not installed; run"):
        preflight.check_machine(ClusterConfig.model_validate(asked), is_local=True)
    colocated = asked | {"prefill": {"replicas": 0}}
    preflight.check_machine(ClusterConfig.model_validate(colocated), is_local=True)


# No user can write to /proc, not even root.
@pytest.mark.parametrize("folder", ["/proc", "/nowhere"])
def test_shared_memory_that_cannot_be_written_to_is_named(folder: str) -> None:
    with pytest.raises(Unavailable, match=f"{folder} cannot be written to: .*--shm-size"):
        preflight.check_shared_memory(Path(folder))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("file", "is not a folder"),
        ("link", "is not a folder"),
        ("open", "can be written to by other users"),
        ("proc", "/proc cannot be written to"),
        ("long part", "longer than the file system allows"),
        ("long", "longer than the file system allows"),
        ("small", "has 100 bytes, and a block of KV takes 81920"),
        ("new", ""),
        ("private", ""),
    ],
)
def test_a_disk_tier_that_cannot_be_used_is_refused(tmp_path: Path, mode: str, words: str) -> None:
    path = tmp_path / "kv"
    if mode == "file":
        path.write_text("")
    elif mode == "link":
        path.symlink_to(tmp_path)
    elif mode == "proc":
        path = Path("/proc/kv")
    elif mode == "long part":
        path /= "x" * 300
    elif mode == "long":
        path = path.joinpath(*["x" * 200] * 20)
    elif mode != "new":
        path.mkdir(mode=0o700)
        path.chmod(0o777 if mode == "open" else 0o700)
    tier = {"kind": "disk", "path": str(path), "size": 100 if mode == "small" else 2**20}
    loaded = ClusterConfig.model_validate({"listen": FREE_PORTS, "kv": {"tiers": [tier]}})
    if not words:
        preflight.check_machine(loaded, is_local=True)
        return
    with pytest.raises(ConfigError, match=f"kv.tiers: .*{words}"):
        preflight.check_machine(loaded, is_local=True)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("missing", "there is no such folder"),
        ("file", "is a file; give the folder of an adapter"),
        ("empty", "adapter_config.json"),
        ("damaged", "it is not JSON"),
    ],
)
def test_an_adapter_that_cannot_be_read_is_refused(tmp_path: Path, mode: str, words: str) -> None:
    path = tmp_path / "sql"
    if mode == "file":
        path.write_text("")
    elif mode != "missing":
        path.mkdir()
    if mode == "damaged":
        (path / "adapter_config.json").write_text("{")
        (path / "adapter_model.safetensors").write_bytes(b"")
    serve = [{"name": "sql", "path": str(path)}]
    loaded = ClusterConfig.model_validate({"listen": FREE_PORTS, "adapters": {"serve": serve}})
    with pytest.raises(ConfigError, match=rf"^adapters\.serve\[0\]\.path: .*{words}"):
        preflight.check_machine(loaded, is_local=True)


def test_a_host_tier_that_exceeds_the_memory_is_refused() -> None:
    tier = {"kind": "host", "size": 2**50}
    loaded = ClusterConfig.model_validate({"listen": FREE_PORTS, "kv": {"tiers": [tier]}})
    with pytest.raises(ConfigError, match="the host tier of a prefill worker takes"):
        preflight.check_machine(loaded, is_local=True)


def test_a_machine_whose_loopback_is_down_is_refused() -> None:
    program = "from kvrelay.launch.checks.preflight import _check_loopback; _check_loopback()"
    done = subprocess.run(
        ["unshare", "-Urn", sys.executable, "-c", program], capture_output=True, text=True
    )
    if done.stderr.startswith("unshare:"):
        pytest.skip(done.stderr)
    assert "127.0.0.1 does not answer: Network is unreachable" in done.stderr
    preflight._check_loopback()
