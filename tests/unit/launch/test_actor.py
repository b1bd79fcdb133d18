"""What the launcher gives a worker; that Ray runs it is the business of tests/cluster."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from kvrelay.config.listen import ListenConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.config.security import KeyPairConfig, SecurityConfig, TlsConfig
from kvrelay.errors import ConfigError, NotFound
from kvrelay.launch.actor import on_this_node
from kvrelay.launch.launcher import require_gpus
from kvrelay.models import resolve_model
from kvrelay.worker.runtime.settings import WorkerSettings


def settings(worker_host: str) -> WorkerSettings:
    pair = KeyPairConfig(cert="a", key="b")
    security = SecurityConfig(tls=TlsConfig(ca="c", router=pair, worker=pair))
    config = ClusterConfig(listen=ListenConfig(worker_host=worker_host), security=security)
    return WorkerSettings("decode-1", "decode", "demo", "redis://127.0.0.1:6379/0", config)


def test_the_model_is_looked_for_on_this_host() -> None:
    assert on_this_node(settings("127.0.0.1")).model_path == resolve_model("demo")
    with pytest.raises(NotFound, match="no such folder"):
        on_this_node(replace(settings("127.0.0.1"), model_path="/nowhere/model"))


def test_auto_is_an_address_of_this_host() -> None:
    placed = on_this_node(settings("auto"))
    host = placed.config.listen.worker_host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.bind((host, 0))  # fails for an address that is not this host's
    assert placed.config.listen == ListenConfig(worker_host=placed.config.listen.worker_host)
    assert placed.worker_id == "decode-1"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.7"])
def test_any_other_address_stays(host: str) -> None:
    assert on_this_node(settings(host)).config == settings(host).config


@pytest.mark.parametrize(
    ("prefill", "decode", "found", "enough"),
    [
        (0, 0, 0, True),
        (1, 1, 2, True),
        (0.5, 0.5, 1, True),
        (1, 1, 1, False),
        (0, 1, 0, False),
        (1, 0, 0, False),
    ],
)
def test_gpus_that_are_not_there(prefill: float, decode: float, found: float, enough: bool) -> None:
    pools = {"prefill": prefill, "decode": decode}
    config = ClusterConfig.model_validate(
        {name: {"resources": {"num_gpus": amount}} for name, amount in pools.items()}
    )
    if enough:
        require_gpus([(config, 0)], found)
    else:
        with pytest.raises(
            ConfigError,
            match=rf"need {prefill + decode:g} GPUs .*, and Ray finds "
            rf"{found:g} on",
        ):
            require_gpus([(config, 0)], found)
