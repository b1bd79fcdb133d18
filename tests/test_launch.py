"""What the launcher gives a worker; that Ray runs it is the business of tests/cluster."""

from __future__ import annotations

import socket

import pytest

from kvrelay.config import ClusterConfig, ListenConfig
from kvrelay.launch import _on_this_node
from kvrelay.worker.settings import WorkerSettings


def settings(worker_host: str) -> WorkerSettings:
    config = ClusterConfig(listen=ListenConfig(worker_host=worker_host))
    return WorkerSettings("decode-1", "decode", "demo", "redis://127.0.0.1:6379/0", config)


def test_auto_is_an_address_of_this_host() -> None:
    placed = _on_this_node(settings("auto"))
    host = placed.config.listen.worker_host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.bind((host, 0))  # fails for an address that is not this host's
    assert placed.config.listen == ListenConfig(worker_host=placed.config.listen.worker_host)
    assert placed.worker_id == "decode-1"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.7"])
def test_any_other_address_stays(host: str) -> None:
    given = settings(host)
    assert _on_this_node(given) == given
