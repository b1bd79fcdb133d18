"""Every command, option, port, path, variable and key in k8s/ is one that this code, or Ray, really
has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import httpx
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr as node_types_of,
)
from support.command_lines import BAD_USAGE, KVRELAY, resolve
from support.rendered_manifests import (
    FOLDER,
    ROOT,
    VARIANTS,
    Manifest,
    Rendered,
    missing_renderer,
    rendered,
)
from support.router_harness import running_router

import autoscaler.worker_drain
from autoscaler.scaling_policy import PoolSnapshot, decide
from kvrelay.loopback import is_loopback
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.security import tls_roles as roles
from kvrelay.types.workers import POOLS, PoolName
from kvrelay.worker.runtime.grpc_server import STOP_GRACE_S

if reason := missing_renderer():
    pytest.skip(reason, allow_module_level=True)

DOCKERFILE = (ROOT / "Dockerfile").read_text()
LEAVE_NODE = FOLDER / "leave-node"
RAY_COMMANDS_S = 15  # for `ray drain-node`, which starts a driver
each_variant = pytest.mark.parametrize("variant", VARIANTS)
IN_TREE = [one for one in VARIANTS if one != "overlays/keda"]


def commands() -> Iterator[tuple[str, list[str]]]:
    for variant in VARIANTS:
        shown = rendered(variant)
        for name, (_, one) in shown.containers.items():
            line = [*one.get("command", []), *one.get("args", [])]
            if line and line[0] in ("kvrelay", "ray"):
                yield f"{variant} {name}", line
        groups = {"head": shown.ray["spec"]["headGroupSpec"], **shown.groups}
        for name, group in groups.items():  # as KubeRay makes a command line of them
            flags = " ".join(f"--{key}={value}" for key, value in group["rayStartParams"].items())
            yield f"{variant} {name}", ["ray", "start", *shlex.split(flags)]
    for text in (
        LEAVE_NODE.read_text(),
        *re.findall(r"```sh\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL),
    ):
        for line in re.findall(
            r"(?:^|-- )((?:kvrelay|ray) "
            r"[a-z].*)$",
            text.replace("\\\n", " "),
            re.MULTILINE,
        ):
            yield line, shlex.split(re.split(r" [>|]+ ", line)[0])


@pytest.mark.parametrize("arguments", [pytest.param(line, id=name) for name, line in commands()])
def test_commands_and_their_options_exist(arguments: list[str]) -> None:
    resolve(arguments)


def test_a_wrong_command_does_not_pass() -> None:
    for wrong in (
        "kvrelay router --confg x",
        "kvrelay routers",
        "kvrelay scale prefil=2 --hurry",
        "ray start --num-cpu=1",
    ):
        with pytest.raises((click.UsageError, BAD_USAGE, KeyError)):
            resolve(wrong.split())


def environment(shown: Rendered) -> set[str]:
    return {
        one["name"]
        for _, container in shown.containers.values()
        for one in container.get("env", [])
    }


@each_variant
def test_variables_are_read_by_somebody(variant: str) -> None:
    ours = {
        parameter.envvar
        for command in KVRELAY.commands.values()
        for parameter in command.params
        if parameter.envvar
    }
    assert environment(rendered(variant)) <= ours | {
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
    }


@each_variant
def test_the_configuration_loads(variant: str, tmp_path: Path) -> None:
    config = rendered(variant).config(tmp_path)
    assert config.listen.worker_host == "auto"
    assert config.transfer.transport == "auto"  # between pods: grpc
    assert config.security.tls is not None
    assert is_loopback(config.listen.admin)
    assert (
        (config.security.tokens_file is None)
        is is_loopback(config.listen.grpc)
        is is_loopback(config.listen.http)
    )
    for name, (_, container) in rendered(variant).containers.items():
        for argument in container.get("command", []):
            if argument.startswith("/"):
                assert Path(argument) == Path("/etc/kvrelay/cluster.yaml"), name


def test_the_variants_differ_in_what_they_say_only(tmp_path: Path) -> None:
    base, secure, gpu = (
        rendered(one).config(tmp_path) for one in ("base", "overlays/secure", "overlays/gpu")
    )
    opened = {"listen": secure.listen, "security": secure.security}
    assert base.model_copy(update=opened) == secure
    assert secure.listen.model_dump().items() - base.listen.model_dump().items() == {
        ("grpc", "0.0.0.0:50051"),
        ("http", "0.0.0.0:8000"),
    }
    for_gpus = {name: getattr(gpu, name) for name in ("model", "kv", "prefill", "decode")}
    assert secure.model_copy(update=for_gpus) == gpu
    for pool in (gpu.prefill, gpu.decode):
        assert (pool.resources.num_gpus, pool.resources.num_cpus) == (1, 4)
        assert pool.engine == "vllm"


@each_variant
def test_each_part_has_the_certificate_of_its_role_and_no_other(
    variant: str, tmp_path: Path
) -> None:
    shown = rendered(variant)
    config = shown.config(tmp_path)
    assert config.security.tls is not None
    named = {config.security.tls.ca}
    for pair in (config.security.tls.router, config.security.tls.worker):
        named |= {pair.cert, pair.key}
    assert named == {f"/etc/kvrelay-tls/{name}" for name in ("ca.crt", "tls.crt", "tls.key")}
    assert (
        secret_keys("kvrelay-router-tls")
        == secret_keys("kvrelay-worker-tls")
        == {"ca.crt", "tls.crt", "tls.key"}
    )
    for name, (template, container) in shown.containers.items():
        secrets = mounted_secrets(template, container)
        role = {
            "controller": "router",
            "router": "router",
            "ray-worker": "worker",
            "kv-store": "worker",
        }.get(container["name"])
        assert secrets.get("/etc/kvrelay-tls") == (role and f"kvrelay-{role}-tls"), name
        tokens = container["name"] == "router" and config.security.tokens_file is not None
        assert ("/etc/kvrelay-tokens" in secrets) is tokens, name
    if config.security.tokens_file is not None:
        assert config.security.tokens_file == "/etc/kvrelay-tokens/tokens.yaml"
        assert secret_keys("kvrelay-tokens") == {"tokens.yaml"}


def mounted_secrets(template: Manifest, container: Manifest) -> dict[str, str]:
    volumes = {
        one["name"]: one["secret"]["secretName"]
        for one in template["spec"]["volumes"]
        if "secret" in one
    }
    return {
        mount["mountPath"]: volumes[mount["name"]]
        for mount in container["volumeMounts"]
        if mount["name"] in volumes
    }


def secret_keys(name: str) -> set[str]:
    """Of a Secret, as README.md makes it."""
    text = (FOLDER / "README.md").read_text().replace("\\\n", " ")
    (line,) = set(re.findall(rf"create secret generic {name} (.*)$", text, re.MULTILINE))
    return set(re.findall(r"--from-file=([\w.]+)=", line))


def test_tiers_name_each_pod_of_the_stores_and_its_port(tmp_path: Path) -> None:
    shown = rendered("overlays/kv-store")
    config = shown.config(tmp_path)
    (stores,) = shown.of_kind("StatefulSet")
    name, spec = stores["metadata"]["name"], stores["spec"]
    (service,) = [
        one for one in shown.of_kind("Service") if one["metadata"]["name"] == spec["serviceName"]
    ]
    assert service["spec"]["clusterIP"] == "None", "else the pods have no names"
    (port,) = [one["port"] for one in service["spec"]["ports"]]
    (container,) = spec["template"]["spec"]["containers"]
    assert [one["containerPort"] for one in container["ports"]] == [port]
    given = dict(pairwise(container["command"]))
    assert given["--listen"] == f"0.0.0.0:{port}"
    for pool in POOLS:
        (tier,) = config.pool_kv(pool).tiers
        assert tier.kind == "remote"
        assert tier.addresses == tuple(
            f"{name}-{number}.{spec['serviceName']}:{port}" for number in range(spec["replicas"])
        )
    limit = bytes_of(container["resources"]["limits"]["memory"])
    assert bytes_of(given["--size"]) + 2**30 <= limit
    secure = rendered("overlays/secure").config(tmp_path)
    assert config.model_copy(update={"kv": secure.kv}) == secure


def bytes_of(quantity: str) -> int:
    return int(quantity.rstrip("GiB")) * 2**30


@each_variant
def test_services_lead_to_what_listens(variant: str, tmp_path: Path) -> None:
    shown = rendered(variant)
    config = shown.config(tmp_path)
    services = {one["metadata"]["name"]: one["spec"] for one in shown.of_kind("Service")}
    redis = services.pop("kvrelay-redis")
    assert config.redis.url == f"redis://kvrelay-redis:{redis['ports'][0]['port']}/0"
    services.pop("kvrelay-kv-store", None)
    redis_ports = shown.containers["kvrelay-redis/redis"][1]["ports"]
    assert {"name": redis["ports"][0]["targetPort"], "containerPort": 6379} in redis_ports
    listening = {"grpc": config.listen.grpc, "http": config.listen.http}
    ports = {
        one["name"]: one["containerPort"]
        for one in shown.containers["kvrelay-router/router"][1].get("ports", [])
    }
    if is_loopback(config.listen.grpc):
        assert services == {}, "nobody could reach the routers by a Service"
        assert ports == {}
        return
    assert ports == {name: int(address.rpartition(":")[2]) for name, address in listening.items()}
    assert all(address.startswith("0.0.0.0:") for address in listening.values())
    assert services.keys() == {"kvrelay-router", "kvrelay-router-grpc"}
    for name, endpoint in (("kvrelay-router", "http"), ("kvrelay-router-grpc", "grpc")):
        assert services[name]["ports"] == [
            {"name": endpoint, "port": ports[endpoint], "targetPort": endpoint}
        ]
    assert services["kvrelay-router-grpc"]["clusterIP"] == "None"
    (monitor,) = shown.of_kind("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    watched = [
        one["metadata"]["name"]
        for one in shown.of_kind("Service")
        if monitor["spec"]["selector"]["matchLabels"].items()
        <= one["metadata"].get("labels", {}).items()
    ]
    assert watched == ["kvrelay-router"], "else each router would be asked twice"
    assert secret_keys(endpoint["authorization"]["credentials"]["name"]) == {"token"}
    readme = (FOLDER / "README.md").read_text()
    assert f"--host {endpoint['tlsConfig']['serverName']}" in readme, (
        "the certificate has to have this name"
    )


def test_cert_manager_would_make_what_the_parts_ask_of_each_other() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    issuer, router, worker = yaml.safe_load_all(block)
    for role, one in (("router", router), ("worker", worker)):
        assert one["spec"]["uris"] == [roles.uri(role)]
        assert one["spec"]["secretName"] == f"kvrelay-{role}-tls"
        assert one["spec"]["issuerRef"]["name"] == issuer["metadata"]["name"]
        assert {"server auth", "client auth"} <= set(one["spec"]["usages"])
    assert worker["spec"]["dnsNames"] == [roles.WORKER_NAME]
    services = {
        one["metadata"]["name"] for one in rendered("overlays/secure").of_kind("Service")
    } - {"kvrelay-redis"}
    assert {"localhost", *(f"{name}.kvrelay.svc" for name in services)} == set(
        router["spec"]["dnsNames"]
    )


def probe_paths(shown: Rendered, tmp_path: Path) -> Iterator[tuple[str, str]]:
    config = shown.config(tmp_path)
    _, container = shown.containers["kvrelay-router/router"]
    for kind in ("readinessProbe", "livenessProbe"):
        probe = container[kind]
        if "httpGet" in probe:
            assert (probe["httpGet"]["port"], probe["httpGet"]["scheme"]) == ("http", "HTTPS")
            yield kind, probe["httpGet"]["path"]
        else:
            url = probe["exec"]["command"][-1]
            assert url.startswith(f"https://{config.listen.http}/"), (
                "TLS is on, and on loopback too"
            )
            yield kind, url.removeprefix(f"https://{config.listen.http}")


async def test_probes_ask_for_what_a_router_answers_without_a_token(tmp_path: Path) -> None:
    paths = {probe for variant in VARIANTS for probe in probe_paths(rendered(variant), tmp_path)}
    assert paths == {("readinessProbe", "/health"), ("livenessProbe", "/")}
    async with running_router() as router, httpx.AsyncClient() as http:
        for path in (*(path for _, path in paths), "/metrics"):
            assert (await http.get(f"{router.http}{path}")).status_code == 200


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("variant", IN_TREE)
def test_rays_autoscaler_has_room_for_each_worker_in_its_own_group_only(
    variant: str, pool: PoolName, tmp_path: Path
) -> None:
    shown = rendered(variant)
    config = shown.config(tmp_path)
    wanted = getattr(config, pool).resources
    asked = {
        "CPU": wanted.num_cpus,
        **({"GPU": wanted.num_gpus} if wanted.num_gpus else {}),
        **wanted.custom,
    }
    # As Ray's autoscaler reads the RayCluster that it is given.
    types = node_types_of(shown.ray)["available_node_types"]
    fits = [
        name
        for name, one in types.items()
        if all(one["resources"].get(r, 0) >= n for r, n in asked.items())
    ]
    assert fits == [pool]
    assert types[pool]["resources"]["CPU"] < 2 * wanted.num_cpus, "one worker for each pod"
    bounds = shown.policy(tmp_path).pool(pool)
    assert bounds is not None
    assert (types[pool]["min_workers"], types[pool]["max_workers"]) == (
        bounds.min_replicas,
        bounds.max_replicas,
    )
    assert shown.groups[pool]["replicas"] == getattr(config, pool).replicas
    assert types["headgroup"]["resources"]["CPU"] == 0


@pytest.mark.parametrize("pool", POOLS)
def test_keda_has_the_last_word_where_it_decides(pool: PoolName, tmp_path: Path) -> None:
    """kvrelay's own autoscaler wants as many workers as there can be pods, whatever the load, and
    so never decides.
    """
    shown = rendered("overlays/keda")
    (scaled,) = [
        one["spec"]
        for one in shown.of_kind("ScaledObject")
        if one["metadata"]["name"] == f"kvrelay-{pool}"
    ]
    bounds = shown.policy(tmp_path).pool(pool)
    assert bounds is not None
    most = scaled["maxReplicaCount"]
    assert bounds.min_replicas == bounds.max_replicas == most
    for size in (1, most, most + 3):
        for load in ({}, {"queue_depth": 0.0}, {"queue_depth": 1000.0}):
            assert decide(PoolSnapshot(size, size, load), bounds, None, 0.0)[0].desired == most
    config = shown.config(tmp_path)
    assert getattr(config, pool).replicas == scaled["minReplicaCount"], (
        "a router is ready when so many workers are"
    )
    deployment = shown.pods[f"kvrelay-{pool}"]
    assert scaled["scaleTargetRef"] == {"name": f"kvrelay-{pool}"}
    (container,) = deployment["spec"]["containers"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])
    resources = getattr(config, pool).resources
    assert flags["resources"] == f'{{"{pool}": {resources.custom[pool]:g}}}'
    assert float(flags["num-cpus"]) == resources.num_cpus
    head = shown.ray["metadata"]["name"]
    assert container["command"][-1] == f"{head}-head-svc:6379", (
        "as KubeRay names the head's Service"
    )
    tokens = [
        one["valueFrom"]["secretKeyRef"]
        for one in container["env"]
        if one["name"] == "RAY_AUTH_TOKEN"
    ]
    assert tokens == [{"name": head, "key": "auth_token"}], "as KubeRay names Ray's token"


@each_variant
def test_pods_that_drain_have_the_time_for_it(variant: str) -> None:
    for name, template in rendered(variant).pods.items():
        if name in ("kvrelay-redis", "kvrelay-kv-store"):
            continue
        (container,) = template["spec"]["containers"]
        before = container.get("lifecycle", {}).get("preStop", {})
        if "sleep" in before:
            needed = before["sleep"]["seconds"] + DRAIN_GRACE_S + 3  # listeners close within these
        elif name == "head":
            needed = DRAIN_GRACE_S  # Ray's own
        else:
            assert before == {"exec": {"command": [LEAVE_NODE.name]}}
            rays = 30  # RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, if the worker has not ended
            needed = (
                RAY_COMMANDS_S
                + DRAIN_GRACE_S
                + STOP_GRACE_S
                + autoscaler.worker_drain.LATE_S
                + rays
            )
        assert template["spec"]["terminationGracePeriodSeconds"] > needed, name


def test_the_image_has_the_ray_that_the_cluster_names() -> None:
    assert (
        f"ray=={rendered('base').ray['spec']['rayVersion']} \\"
        in (ROOT / "requirements" / "cpu.lock").read_text()
    )


@each_variant
def test_containers_run_as_the_images_user_and_write_where_it_writes(variant: str) -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    (work,) = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE.rpartition("FROM")[2], re.MULTILINE)
    homes = re.findall(r" (?:HOME|XDG_CACHE_HOME)=(\S+)", DOCKERFILE)
    assert len(homes) == 2
    assert {Path(home).parts[:2] for home in homes} == {Path(work).parts}
    for name, (template, container) in rendered(variant).containers.items():
        if not container["image"].startswith("kvrelay"):
            continue
        security = template["spec"]["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"]) == tuple(map(int, user)), name
        writable = [
            mount["mountPath"]
            for mount in container["volumeMounts"]
            if not mount.get("readOnly", False)
        ]
        assert work in writable, name


def test_the_dashboard_is_in_a_config_map() -> None:
    for variant in VARIANTS:
        assert rendered(variant).config_map("kvrelay-dashboard").keys() == {
            "grafana-dashboard.json"
        }
    assert (FOLDER / "base" / "grafana-dashboard.json").read_text() == rendered("base").config_map(
        "kvrelay-dashboard"
    )["grafana-dashboard.json"]
