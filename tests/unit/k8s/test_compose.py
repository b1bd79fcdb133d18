"""compose.yaml and its folder: commands, files, ports, volumes and rights fit together, and fit
this code.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.command_lines import resolve
from support.router_harness import running_router

from kvrelay.config.config_file import load_config
from kvrelay.config.tokens_file import load_tokens
from kvrelay.loopback import is_loopback
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.security.credentials import Credentials
from kvrelay.types.workers import POOLS
from kvrelay.worker.runtime.grpc_server import STOP_GRACE_S

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "compose"
SECRETS = "/etc/kvrelay-secrets"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
CONFIG = load_config(FOLDER / "cluster.yaml")
# The parts that run until they are stopped.
PARTS = ("controller", "prefill", "decode", "router")
each_service = pytest.mark.parametrize("service", SERVICES)


def commands(service: str) -> list[list[str]]:
    """The commands of kvrelay and Ray that a container runs."""
    command = SERVICES[service]["command"]
    if command[:2] == ["bash", "-c"]:
        lines = [line.removeprefix("exec ") for line in re.split(r"\s*&&\s*", command[2])]
        return [shlex.split(line) for line in lines]
    return [command]


def mounts(service: str) -> dict[str, str]:
    """Sources of a container's volumes, by target."""
    found = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {target: source for source, target, *_ in found}


def test_it_has_every_part_of_a_cluster() -> None:
    assert SERVICES.keys() == {"secrets", "redis", *PARTS}


@pytest.mark.parametrize("service", PARTS)
def test_commands_and_their_options_exist(service: str) -> None:
    for command in commands(service):
        resolve(command)


def test_commands_of_the_guide_exist() -> None:
    text = (ROOT / "docs/guides/docker-compose.md").read_text()
    found = re.findall(r"^docker compose exec (\w+) (kvrelay .*)$", text, re.MULTILINE)
    assert found
    for service, command in found:
        assert service in SERVICES
        resolve(shlex.split(command))


def test_a_wrong_command_does_not_pass() -> None:
    with pytest.raises(Exception, match="--confg"):
        resolve(["kvrelay", "router", "--confg", "x"])


def test_configuration_files_are_mounted_where_commands_look_for_them() -> None:
    for service in ("router", "controller"):
        (path,) = [word for word in commands(service)[-1] if word.endswith(".yaml")]
        source = mounts(service)[str(Path(path).parent)]
        assert (ROOT / source / Path(path).name).is_file()
    script = SERVICES["secrets"]["command"][1]
    assert (ROOT / mounts("secrets")[str(Path(script).parent)] / Path(script).name).is_file()


def test_published_ports_are_the_routers_and_reach_this_machine_only() -> None:
    listen = {address.rpartition(":")[2] for address in (CONFIG.listen.http, CONFIG.listen.grpc)}
    published = [port.split(":") for port in SERVICES["router"]["ports"]]
    assert {container for _, _, container in published} == listen
    assert all(is_loopback(f"{host}:0") for host, _, _ in published)
    assert not is_loopback(CONFIG.listen.http)
    assert not is_loopback(CONFIG.listen.grpc)
    assert is_loopback(CONFIG.listen.admin)
    assert not any("ports" in SERVICES[name] for name in SERVICES if name != "router")


def test_names_of_other_containers_are_services() -> None:
    assert CONFIG.redis.url == "redis://redis:6379/0"
    for pool in POOLS:
        (start,) = commands(pool)
        assert "--address=controller:6379" in start
    assert CONFIG.listen.worker_host == "auto"
    for service in SERVICES.values():
        assert service.get("depends_on", {}).keys() <= SERVICES.keys()


@pytest.mark.parametrize("pool", POOLS)
def test_a_container_has_room_for_one_worker_of_its_pool(pool: Any) -> None:
    assert f'--resources={{"{pool}":1}}' in commands(pool)[0]
    assert CONFIG.pool(pool).resources.custom == {pool: 1}
    head = commands("controller")[0]
    assert head[head.index("--num-cpus") + 1] == "0", "the head has room for none"


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_has_time_to_drain(pool: str) -> None:
    hooks = [hook["command"] for hook in SERVICES[pool]["pre_stop"]]
    assert hooks == ["leave-node"]
    assert (ROOT / "k8s" / "leave-node").is_file()
    router = SERVICES["router"]["stop_grace_period"]
    assert int(router.removesuffix("s")) > DRAIN_GRACE_S + STOP_GRACE_S


async def test_the_router_is_asked_for_what_it_answers_without_a_token() -> None:
    url = SERVICES["router"]["healthcheck"]["test"][-1]
    port = CONFIG.listen.http.rpartition(":")[2]
    path = url.removeprefix(f"https://127.0.0.1:{port}")
    async with running_router() as router, httpx.AsyncClient() as http:
        assert (await http.get(f"{router.http}{path}")).status_code == 200


@each_service
def test_containers_are_confined(service: str) -> None:
    container = SERVICES[service]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert not container.keys() & {"privileged", "pid", "ipc"}
    # Only the container that makes the secrets runs as root, once and without a network.
    is_root = container.get("user", "1000").startswith("0")
    assert is_root is (service == "secrets")
    assert ("cap_add" in container) is is_root
    assert (container.get("network_mode") == "none") is is_root
    for volume in container.get("volumes", []):
        assert volume.endswith(":ro") or is_root


@each_service
def test_volumes_are_declared_and_tmpfs_are_bounded(service: str) -> None:
    container = SERVICES[service]
    for volume in container.get("volumes", []):
        source = volume.split(":")[0]
        assert source.startswith("./") or source in COMPOSE["volumes"]
    assert all("size=" in one for one in container["tmpfs"])


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volumes as `make-secrets` fills them, here with files of the user who runs the tests."""
    top = tmp_path_factory.mktemp("compose")
    volumes = top / "secrets"
    for target in mounts("secrets"):
        if target.startswith("/secrets/"):
            (volumes / target.removeprefix("/secrets/")).mkdir(parents=True)
    script = (FOLDER / "make-secrets").read_text()
    mine = script.replace("-o 1000 -g 1000", f"-o {os.getuid()} -g {os.getgid()}")
    assert mine != script
    (top / "make-secrets").write_text(mine)
    (top / "home").mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(top / "home"), "PATH": path}
    for _ in range(2):
        # The second run changes nothing.
        before = {path: path.read_bytes() for path in volumes.rglob("*") if path.is_file()}
        command = ["bash", str(top / "make-secrets"), str(volumes)]
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=120)
        assert all(path.read_bytes() == data for path, data in before.items())
    assert before
    return volumes


def test_each_part_gets_the_secrets_that_it_reads_and_no_others(secrets: Path) -> None:
    by_volume = {
        source: target for target, source in mounts("secrets").items() if "secrets" in source
    }
    held = {folder.name: {path.name for path in folder.iterdir()} for folder in secrets.iterdir()}
    pair = {"ca.pem", "cert.pem", "key.pem"}
    assert held == {
        "router": {*pair, "tokens.yaml"},
        "controller": {*pair, "ray-token"},
        "worker": {*pair, "ray-token"},
        "client": {"ca.pem", "admin.token", "client.token"},
    }
    for service, folder in {
        "router": "router",
        "controller": "controller",
        "prefill": "worker",
        "decode": "worker",
    }.items():
        assert by_volume[mounts(service)[SECRETS]] == f"/secrets/{folder}"
        token = SERVICES[service].get("environment", {}).get("RAY_AUTH_TOKEN_PATH")
        assert token == (None if service == "router" else f"{SECRETS}/ray-token")
    client = mounts("router")["/etc/kvrelay-client"]
    assert by_volume[client] == "/secrets/client"
    for path in secrets.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o400


def test_the_secrets_are_those_of_the_configuration(secrets: Path, tmp_path: Path) -> None:
    """Certificates of each role, and tokens of a client and of an operator, load."""
    assert CONFIG.security.tokens_file == f"{SECRETS}/tokens.yaml"
    for folder, role in (("router", "router"), ("controller", "router"), ("worker", "worker")):
        there = tmp_path / folder
        shutil.copytree(secrets / folder, there)
        text = (FOLDER / "cluster.yaml").read_text().replace(SECRETS, str(there))
        (there / "cluster.yaml").write_text(text)
        config = load_config(there / "cluster.yaml")
        assert Credentials.internal(config.security, role) is not None
    tenants = load_tokens(secrets / "router" / "tokens.yaml").values()
    assert {tenant.name: tenant.roles for tenant in tenants} == {
        "client": frozenset({"client"}),
        "admin": frozenset({"admin", "client"}),
    }
