"""Ray itself: who is let in, and what an address is worth."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ray._private import services

from kvrelay.config.pools import Resources
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Unavailable
from kvrelay.launch.launcher import RayLauncher
from kvrelay.launch.ray import cluster as cluster_module
from kvrelay.launch.ray import probe
from kvrelay.launch.ray.cluster import RayCluster, local_cpus
from kvrelay.launch.ray.probe import check_ray
from kvrelay.process.child import command_of
from kvrelay.worker.runtime.settings import WorkerSettings

LARGE = ClusterConfig.model_validate({"decode": {"resources": {"num_cpus": 2}}})


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Says that to everybody who connects, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if answer:
                    connection.sendall(answer)

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in kept:
            one.close()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "HTTP"]
)
def test_what_listens_but_is_no_ray(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_CONNECT_S", 1.0)
    with (
        listener(answer) as address,
        pytest.raises(Unavailable, match=f"no Ray answers at {address}: "),
    ):
        check_ray(address)


def test_where_nothing_listens() -> None:
    with (
        pytest.raises(Unavailable, match=r"no Ray answers at .*:1: .*refused"),
        RayCluster("127.0.0.1:1"),
    ):
        pytest.fail("there is no Ray")


# Ray drops the process of a start that failed.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.long
def test_a_local_ray_whose_gcs_server_hangs_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "60")
    start, hung = services.start_gcs_server, list[int]()

    def hangs_once(*arguments: Any, **named: Any) -> Any:
        process = start(*arguments, **named)
        if not hung:
            hung.append(process.process.pid)
            process.process.send_signal(signal.SIGSTOP)
            monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "1")
        else:
            monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "60")
        return process

    monkeypatch.setattr(services, "start_gcs_server", hangs_once)
    with RayCluster(num_cpus=1):
        assert ray.cluster_resources()["CPU"] == 1
        assert command_of(hung[0]) != "gcs_server"
    gc.collect()


# Ray waits 30 s for its raylet.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("hangs", [1, 2])
def test_a_local_ray_whose_raylet_hangs_starts_again_or_says_so(
    monkeypatch: pytest.MonkeyPatch, hangs: int
) -> None:
    start, hung = services.start_raylet, list[int]()

    def hang(*arguments: Any, **named: Any) -> Any:
        process = start(*arguments, **named)
        if len(hung) < hangs:
            hung.append(process.process.pid)
            process.process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(services, "start_raylet", hang)
    if hangs == 1:
        with RayCluster(num_cpus=1):
            assert ray.cluster_resources()["CPU"] == 1
    else:
        with (
            pytest.raises(Unavailable, match=r"2 times.* If the machine is busy, try again later"),
            RayCluster(num_cpus=1),
        ):
            pass
    assert not any(command_of(one) == "raylet" for one in hung)
    gc.collect()


async def test_a_local_ray_wants_its_token_and_who_finds_no_room_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with RayCluster(num_cpus=1) as cluster:
        address = ray.get_runtime_context().gcs_address
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert not token.is_relative_to(Path.home())
        assert os.stat(token).st_mode & 0o777 == 0o600
        check_ray(address)
        token_of_another = token.with_name("another")
        token_of_another.write_text("0" * 64)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token_of_another))
        cluster_module.AuthenticationTokenLoader.instance().reset_cache()
        with pytest.raises(Unavailable, match="requires a token: set RAY_AUTH_MODE=token"):
            check_ray(address)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        cluster_module.AuthenticationTokenLoader.instance().reset_cache()
        monkeypatch.setattr(ray, "__version__", "0.1")
        with pytest.raises(
            Unavailable,
            match=r"Ray at .* has version [0-9.]+, and this process has 0.1; install the same",
        ):
            check_ray(address)
        monkeypatch.undo()
        monkeypatch.setattr(probe, "_is_here", lambda _: False)
        with pytest.raises(Unavailable, match="this machine is not one of the 1 nodes of Ray at "):
            check_ray(address)
        monkeypatch.undo()

        launcher = RayLauncher(WorkerSettings("", "decode", "demo", "redis://", LARGE), cluster)
        await launcher.start("decode", "decode-0")
        assert launcher.alive() == {"decode-0": "decode"}
        (reason,) = launcher.pending().values()
        assert reason.startswith("no Ray node is large enough for 2 logical CPUs: ")
        assert reason.endswith(" has 1 of 1 logical CPU free")
        await launcher.stop("decode-0")
        assert not launcher.alive()


def test_ray_gets_a_whole_number_of_cpus() -> None:
    half = {"resources": {"num_cpus": 0.5}}
    config = ClusterConfig.model_validate({"prefill": half})
    assert local_cpus([(config, {"prefill": 301, "decode": 1}, 0)]).is_integer()
    assert local_cpus([(config, {"prefill": 301, "decode": 1}, 0)]) >= 151.5


class Reserved:
    """An actor that only reserves resources."""


AMOUNTS = st.one_of(st.floats(0, 64), st.floats(0, 0.001), st.integers(0, 64))


@pytest.mark.long
def test_ray_takes_all_resources_that_the_configuration_accepts() -> None:
    @given(AMOUNTS, AMOUNTS, st.dictionaries(st.text(max_size=8), AMOUNTS, max_size=2))
    def accepts(cpus: float, gpus: float, custom: dict[str, float]) -> None:
        try:
            resources = Resources(num_cpus=cpus, num_gpus=gpus, custom=custom)
        except ValidationError:
            return
        actor = ray.remote(Reserved).options(
            num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, resources=resources.custom
        )
        ray.kill(actor.remote())

    with RayCluster(num_cpus=1):
        accepts()
