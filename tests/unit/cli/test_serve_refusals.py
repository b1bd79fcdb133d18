"""Set-ups in which `kvrelay serve` cannot run: each ends by itself, and says why and what to do, in
one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.certificates import DAY, Certificates, all_roles, tls_section
from support.prepared import prepared

from kvrelay.models import resolve_model
from kvrelay.process.machine import Machine
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.workers import WorkerInfo

pytestmark = pytest.mark.timeout(600)
SECONDS = 300  # after which a command does not end by itself
FREE_PORTS = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")


@dataclass
class Setup:
    """What a user has; one of its parts is broken."""

    folder: Path
    exits: ExitStack
    config: dict[str, Any] = field(default_factory=lambda: {"listen": dict(FREE_PORTS)})
    environment: dict[str, str] = field(default_factory=dict)
    largest_file: int | None = None  # bytes

    def model(self) -> Path:
        """A copy of the bundled one, to break."""
        copy = Path(shutil.copytree(resolve_model("demo"), self.folder / "model"))
        self.config["model"] = {"path": str(copy)}
        return copy

    def certificates(self, made: Certificates) -> None:
        self.config["security"] = {"tls": tls_section(made.folder)}

    def policy(self, **pool: Any) -> None:
        (self.folder / "policy.yaml").write_text(yaml.safe_dump({"decode": pool}))
        self.config["autoscaling"] = "policy.yaml"


async def serve(setup: Setup) -> tuple[int, str]:
    """Exit code and stderr."""
    path = setup.folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(setup.config))

    command = [sys.executable, "-m", "kvrelay.cli.main", "serve", "-c", str(path)]
    if (size := setup.largest_file) is not None:
        limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
        command = prepared(f"import resource; {limit}", *command)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**os.environ, **setup.environment},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    done = await asyncio.to_thread(run)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture
def setup(tmp_path: Path) -> Any:
    with ExitStack() as exits:
        yield Setup(tmp_path, exits)


# What is broken; each returns words of the reason, and of what to do.


def no_such_model(setup: Setup) -> tuple[str, str]:
    setup.config["model"] = {"path": str(setup.folder / "nothing")}
    return "there is no such folder", "allowed are"


def a_folder_of_something_else(setup: Setup) -> tuple[str, str]:
    (setup.model() / "config.json").unlink()
    return "config.json is missing", "give a model folder"


def only_pickles(setup: Setup) -> tuple[str, str]:
    model = setup.model()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return (
        "only pytorch_model.bin, and pickled weights can run code",
        "convert the weights to safetensors",
    )


def cut_short(setup: Setup) -> tuple[str, str]:
    weights = setup.model() / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    return "its header requires", "copy it again"


def cut_in_the_header(setup: Setup) -> tuple[str, str]:
    os.truncate(setup.model() / "model.safetensors", 100)
    return "invalid or truncated safetensors file", "copy it again"


def a_model_of_the_hub_that_is_not_there(setup: Setup) -> tuple[str, str]:
    setup.config["model"] = {"path": "nobody/nothing"}
    setup.environment["HF_HUB_OFFLINE"] = "1"
    return "the folder does not exist, and the model is not in", "HF_HUB_OFFLINE forbids"


def larger_than_memory(setup: Setup) -> tuple[str, str]:
    size = 4 * Machine.here().memory_bytes
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    weights = setup.model() / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    try:
        os.truncate(weights, weights.stat().st_size + size)  # sparse: takes no room
    except OSError:
        pytest.skip("the file system of the tests does not take files of that size")
    return "for weights, and this machine has", "choose a smaller model"


def more_kv_than_memory(setup: Setup) -> tuple[str, str]:
    setup.config["kv"] = {"memory": "900TiB"}
    return "kv.memory: a prefill worker takes", "set kv.memory lower"


def a_port_in_use(setup: Setup) -> tuple[str, str]:
    other = setup.exits.enter_context(socket.create_server(("127.0.0.1", 0)))
    setup.config["listen"]["http"] = f"127.0.0.1:{other.getsockname()[1]}"
    return "listen.http: cannot listen on", "--http-port"


def one_address_twice(setup: Setup) -> tuple[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    setup.config["listen"] |= dict.fromkeys(("grpc", "admin"), f"127.0.0.1:{port}")
    return f"listen.admin: 127.0.0.1:{port} is listen.grpc too", "--admin-port"


def redis_unreachable(setup: Setup) -> tuple[str, str]:
    silent = setup.exits.enter_context(socket.socket())
    silent.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens there
    port = silent.getsockname()[1]
    setup.config["redis"] = {"url": f"redis://127.0.0.1:{port}/0"}
    return f"redis.url: Redis at 127.0.0.1:{port}", "redis.url: embedded"


def redis_cannot_start(setup: Setup) -> tuple[str, str]:
    folder = setup.folder / ("x" * 100)
    folder.mkdir()
    setup.environment["TMPDIR"] = str(folder)
    return "too long for the path of a Unix socket", "set TMPDIR to a shorter folder"


def no_certificate(setup: Setup) -> tuple[str, str]:
    made = all_roles(setup.folder)
    (setup.folder / "worker.pem").unlink()
    setup.certificates(made)
    return "security.tls.worker.cert", "cannot be read: No such file"


def a_certificate_that_ended(setup: Setup) -> tuple[str, str]:
    made = all_roles(setup.folder)
    made.issue("router", lifetime=DAY, now=datetime.now(UTC) - 3 * DAY)
    setup.certificates(made)
    return "security.tls.router.cert", "replace it with a new certificate"


def a_certificate_of_another_ca(setup: Setup) -> tuple[str, str]:
    made = all_roles(setup.folder)
    (setup.folder / "other").mkdir()
    Certificates(setup.folder / "other")
    shutil.copy(setup.folder / "other" / "ca.pem", setup.folder / "ca.pem")
    setup.certificates(made)
    return "security.tls.router.cert", "is not signed by the CA"


def no_room_on_the_disk(setup: Setup) -> tuple[str, str]:
    setup.largest_file = 2**20
    return "has no room for 32 MiB of a cluster's files", "free disk space there"


def no_gpu(setup: Setup) -> tuple[str, str]:
    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("there is a GPU here")
    setup.config["decode"] = {"resources": {"num_gpus": 1}}
    return "the workers need 1 GPUs (decode 1)", "set num_gpus to 0"


def a_metric_that_is_not_known(setup: Setup) -> tuple[str, str]:
    setup.policy(metrics=[{"name": "happiness", "target": 1}])
    return "decode.metrics[0].name", "must be 'queue_depth'"


def a_minimum_above_the_maximum(setup: Setup) -> tuple[str, str]:
    setup.policy(min_replicas=3, max_replicas=2)
    return "min_replicas 3 is above max_replicas 2", "policy.yaml"


BROKEN: list[Callable[[Setup], tuple[str, str]]] = [
    *(no_such_model, a_folder_of_something_else, only_pickles, cut_short, cut_in_the_header),
    *(a_model_of_the_hub_that_is_not_there, larger_than_memory, more_kv_than_memory),
    *(a_port_in_use, one_address_twice, redis_unreachable, redis_cannot_start),
    *(no_certificate, a_certificate_that_ended, a_certificate_of_another_ca),
    *(no_room_on_the_disk, no_gpu, a_metric_that_is_not_known, a_minimum_above_the_maximum),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
async def test_it_ends_with_one_line_that_says_why(broken: Any, setup: Setup) -> None:
    words = broken(setup)
    code, said = await serve(setup)
    check(code, said, *words)


def check(code: int, said: str, *words: str) -> None:
    assert code in (1, 2), said
    assert len(said.splitlines()) == 1, said
    assert said.startswith("kvrelay: ")
    assert "Traceback" not in said
    for word in words:
        assert word in said


async def test_a_second_cluster_on_one_redis(setup: Setup) -> None:
    async with another_cluster() as url:
        setup.config["redis"] = {"url": url}
        code, said = await serve(setup)
    check(
        code,
        said,
        "another cluster runs on this Redis (decode-7 at 127.0.0.1:1)",
        "a separate database",
    )


@contextlib.asynccontextmanager
async def another_cluster() -> AsyncIterator[str]:
    """The url of a Redis in which a worker tells again and again that it is there."""

    async def beat(registry: Registry) -> None:
        while True:
            info = WorkerInfo(
                "decode-7", "decode", 1, "ready", "127.0.0.1:1", "demo", "00", 16, 64, "host", 4096
            )
            await registry.publish_worker(info, 3.0)
            await asyncio.sleep(0.2)

    async with EmbeddedRedis() as redis, await Registry.connect(redis.url) as registry:
        beating = asyncio.create_task(beat(registry))
        try:
            yield redis.url
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
