"""What `--ray-address` takes, and what a cluster on many hosts needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.main import run
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError
from kvrelay.launch.ray.address import check_ray_address, check_reachable

TLS = {"ca": "ca.pem", "router": {"cert": "r", "key": "k"}, "worker": {"cert": "w", "key": "k"}}
GOOD: dict[str, Any] = {
    "redis": {"url": "redis://10.0.0.1:6379/0"},
    "listen": {"worker_host": "auto"},
    "security": {"tls": TLS},
}


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "head.example:6379", "[fd00::1]:6379"]
)
def test_addresses(address: str) -> None:
    check_ray_address(address)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("", "neither auto nor HOST:PORT"),
        ("local", "neither auto nor HOST:PORT"),
        ("10.0.0.1", "neither auto nor HOST:PORT"),
        ("10.0.0.1:66666", "neither auto nor HOST:PORT"),
        (
            "ray://10.0.0.1:10001",
            "Ray Client is not supported; run this command on one of the",
        ),
    ],
)
def test_no_addresses(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_ray_address(address)


def test_what_is_reachable_from_everywhere() -> None:
    check_reachable(ClusterConfig.model_validate(GOOD))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"redis": {"url": "embedded"}}, "redis.url: embedded is reachable on this machine only"),
        ({"redis": {"url": "unix:///run/redis.sock"}}, "is reachable on this machine only"),
        ({"redis": {"url": "redis://localhost:6379"}}, "localhost is a loopback address"),
        (
            {"redis": {"url": "redis://:secret@127.0.0.1:6379"}},
            "redis.url: 127.0.0.1 is a loopback address",
        ),
        (
            {"listen": {}},
            "listen.worker_host: other Ray nodes cannot reach 127.0.0.1; set worker_host: auto",
        ),
    ],
)
def test_what_is_not(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        check_reachable(ClusterConfig.model_validate(GOOD | change))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("command", ["serve", "controller"])
@pytest.mark.parametrize(
    ("file", "address", "why"),
    [
        ("{}", "auto", "redis.url: embedded"),
        (
            "redis: {url: 'redis://10.0.0.1'}",
            "auto",
            "listen.worker_host: other Ray nodes cannot reach 127.0.0.1",
        ),
        ("{}", "nowhere", "--ray-address 'nowhere' is neither auto nor HOST:PORT"),
        ("{}", "ray://10.0.0.1:10001", "Ray Client is not supported"),
    ],
)
def test_bad_usage_is_told_before_anything_starts(
    command: str,
    file: str,
    address: str,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(file)
    assert run([command, "-c", str(path), "--ray-address", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
