"""Checks of a machine before a cluster starts on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, Unavailable
from kvrelay.launch import preflight
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


# No user can write to /proc, not even root.
@pytest.mark.parametrize("folder", ["/proc", "/nowhere"])
def test_shared_memory_that_cannot_be_written_to_is_named(folder: str) -> None:
    with pytest.raises(Unavailable, match=f"{folder} cannot be written to: .*--shm-size"):
        preflight.check_shared_memory(Path(folder))
