"""Everything in k8s/ is valid by Kubernetes' schemas and names only what this code, or the manifests, really have."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as node_types_of
from ray_cluster_fields import problems

from autoscaler.actuator import Actuator
from kvrelay.cli.main import app
from kvrelay.config import AutoscalingPolicy, ClusterConfig, is_loopback
from kvrelay.config_file import load_config, load_policy
from kvrelay.stop_request import DRAIN_GRACE_S
from kvrelay.types import POOLS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "k8s"
KUBERNETES = "1.33"  # of the schemas
PART_OF = {"app.kubernetes.io/part-of": "kvrelay"}

Manifest = dict[str, Any]


def documents(path: Path) -> Iterator[Manifest]:
    yield from yaml.safe_load_all(path.read_text())


KUSTOMIZATION: Manifest = next(documents(FOLDER / "kustomization.yaml"))
MANIFESTS = [one for name in KUSTOMIZATION["resources"] for one in documents(FOLDER / name)]
RAY = next(one for one in MANIFESTS if one["kind"] == "RayCluster")
GROUPS = {group["groupName"]: group for group in RAY["spec"]["workerGroupSpecs"]}


def of_kind(kind: str) -> list[Manifest]:
    return [one for one in MANIFESTS if one["kind"] == kind]


def pod_templates() -> dict[str, Manifest]:
    found = {one["metadata"]["name"]: one["spec"]["template"] for one in of_kind("Deployment")}
    found["head"] = RAY["spec"]["headGroupSpec"]["template"]
    return found | {name: group["template"] for name, group in GROUPS.items()}


def containers(template: Manifest) -> list[Manifest]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


PODS = pod_templates()
CONTAINERS = {f"{pod}/{one['name']}": (template, one) for pod, template in PODS.items() for one in containers(template)}
pods = pytest.mark.parametrize("template", PODS.values(), ids=PODS.keys())
each_container = pytest.mark.parametrize(("template", "container"), CONTAINERS.values(), ids=CONTAINERS.keys())


def commands() -> dict[str, list[str]]:
    """Every `kvrelay` command line in the manifests and in the README."""
    found = {name: one["command"] for name, (_, one) in CONTAINERS.items() if one.get("command", [""])[0] == "kvrelay"}
    readme = (FOLDER / "README.md").read_text()
    shown = re.findall(r"^kvrelay .*$", "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)), re.MULTILINE)
    return found | {line: shlex.split(line) for line in shown}


def config_of(folder: Path) -> ClusterConfig:
    """The ConfigMap as a pod sees it, loaded as `kvrelay router -c` and `kvrelay controller -c` do."""
    (config_map,) = of_kind("ConfigMap")
    for name, text in config_map["data"].items():
        (folder / name).write_text(text)
    return load_config(folder / "cluster.yaml")


def policy_of(config: ClusterConfig) -> AutoscalingPolicy:
    assert config.autoscaling is not None
    return load_policy(Path(config.autoscaling))


# Schemas


def test_every_file_is_applied() -> None:
    assert sorted(KUSTOMIZATION["resources"]) == sorted(
        path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml"
    )


@pytest.mark.parametrize(
    "manifest",
    [one for one in MANIFESTS if one is not RAY],
    ids=lambda one: f"{one['kind']}-{one['metadata']['name']}",
)
def test_core_kinds_have_the_fields_of_their_schema(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pods
def test_pod_templates_have_the_fields_of_a_core_pod_template(template: Manifest) -> None:
    # The metadata's and the spec's schema are those of a PodTemplateSpec.
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}, "template": template},
        KUBERNETES,
        strict=True,
    )


def test_the_ray_cluster_has_kuberays_fields() -> None:
    assert (RAY["apiVersion"], problems(RAY)) == ("ray.io/v1", [])


def test_a_wrong_ray_cluster_does_not_pass() -> None:
    wrong = yaml.safe_load((FOLDER / "raycluster.yaml").read_text())
    wrong["spec"]["autoscalerOptions"]["version"] = "v3"
    wrong["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    wrong["spec"]["workerGroupSpecs"][0]["minReplica"] = wrong["spec"]["workerGroupSpecs"][0].pop("minReplicas")
    assert problems(wrong) == [
        "spec.autoscalerOptions.version: 'v3' is not one of ('v1', 'v2')",
        "spec.headGroupSpec.rayStartParams.num-cpus: 0 is not a str",
        "spec.workerGroupSpecs.[]: minReplicas is missing",
        "spec.workerGroupSpecs.[]: unknown field minReplica",
    ]


def test_what_kuberay_copies_into_the_autoscalers_container_fits_a_container() -> None:
    options = RAY["spec"]["autoscalerOptions"]
    container = {name: options[name] for name in ("resources", "securityContext", "volumeMounts")}
    pod = {"containers": [{"name": "autoscaler", "image": "kvrelay", **container}]}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}, KUBERNETES, strict=True
    )
    mounted = {mount["name"] for mount in options["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in PODS["head"]["spec"]["volumes"]}


# What the manifests say about this code


@pytest.mark.parametrize("arguments", commands().values(), ids=commands().keys())
def test_commands_and_their_options_exist(arguments: list[str]) -> None:
    _, name, *rest = arguments
    group: Any = typer.main.get_command(app)
    group.commands[name].make_context(name, rest)  # raises for an unknown option or a bad value


def test_the_configuration_loads(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config.listen.worker_host == "auto"
    assert config.transfer.transport == "auto"  # between pods: grpc
    assert config.autoscaling == str(tmp_path / "policy.yaml")


def test_redis_is_where_the_configuration_looks_for_it(tmp_path: Path) -> None:
    (service,) = (one for one in of_kind("Service") if one["metadata"]["name"] == "kvrelay-redis")
    (port,) = service["spec"]["ports"]
    assert config_of(tmp_path).redis.url == f"redis://{service['metadata']['name']}:{port['port']}/0"
    labels = PODS["kvrelay-redis"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (redis,) = containers(PODS["kvrelay-redis"])
    assert {"name": port["targetPort"], "containerPort": port["port"]} in redis["ports"]


def test_the_routers_probes_ask_where_it_listens_and_need_no_token(tmp_path: Path) -> None:
    (container,) = containers(PODS["kvrelay-router"])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    listen = config_of(tmp_path).listen
    assert ports == {"grpc": int(listen.grpc.split(":")[1]), "https": int(listen.http.split(":")[1])}
    for probe, path in (("readinessProbe", "/health"), ("livenessProbe", "/")):
        assert container[probe]["httpGet"] == {"path": path, "port": "https", "scheme": "HTTPS"}
    assert not is_loopback(listen.http)  # where the kubelet could not ask
    assert is_loopback(listen.admin)


def test_the_routers_service_and_policy_lead_to_its_ports() -> None:
    (container,) = containers(PODS["kvrelay-router"])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    (service,) = (one for one in of_kind("Service") if one["metadata"]["name"] == "kvrelay-router")
    assert {one["targetPort"]: one["port"] for one in service["spec"]["ports"]} == ports
    (policy,) = (one for one in of_kind("NetworkPolicy") if one["metadata"]["name"] == "kvrelay-router")
    assert [one["port"] for one in policy["spec"]["ingress"][0]["ports"]] == list(ports)
    labels = PODS["kvrelay-router"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert selector.items() <= labels.items()


@pytest.mark.parametrize(
    ("pod", "container", "role"),
    [("kvrelay-router", "router", "router"), ("head", "controller", "router"), ("prefill", "ray-worker", "worker"),
     ("decode", "ray-worker", "worker")],
)  # fmt: skip
def test_each_pod_has_the_certificate_of_its_role_where_the_configuration_looks_for_it(
    tmp_path: Path, pod: str, container: str, role: str
) -> None:
    tls = config_of(tmp_path).security.tls
    assert tls is not None
    pair = tls.router if role == "router" else tls.worker
    (found,) = (one for one in containers(PODS[pod]) if one["name"] == container)
    (mount,) = (one for one in found["volumeMounts"] if one["name"] == "tls")
    secrets = {one["name"]: one["secret"]["secretName"] for one in PODS[pod]["spec"]["volumes"] if "secret" in one}
    made = re.search(rf"secret generic {secrets['tls']} \\\n(.*)", (FOLDER / "README.md").read_text())
    assert made is not None, "the README makes it"
    files = {f"{mount['mountPath']}/{Path(one).name}" for one in re.findall(r"--from-file=(\S+)", made[1])}
    assert files == {tls.ca, pair.cert, pair.key}


def test_the_router_has_the_tokens_where_the_configuration_looks_for_them(tmp_path: Path) -> None:
    (container,) = containers(PODS["kvrelay-router"])
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "tokens")
    assert config_of(tmp_path).security.tokens_file == f"{mount['mountPath']}/tokens.yaml"
    assert "secret generic kvrelay-tokens --from-file=tokens.yaml" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("pool", POOLS)
def test_rays_autoscaler_has_room_for_each_worker_in_its_own_group_only(pool: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wanted = getattr(config, pool).resources
    asked = {"CPU": wanted.num_cpus, **wanted.custom}
    # As Ray's autoscaler reads the RayCluster that it is given.
    types = node_types_of({**RAY, "metadata": {**RAY["metadata"], "namespace": "kvrelay"}})["available_node_types"]
    fits = [name for name, one in types.items() if all(one["resources"].get(r, 0) >= n for r, n in asked.items())]
    assert fits == [pool]
    assert types[pool]["resources"]["CPU"] < 2 * wanted.num_cpus, "one worker for each pod"
    bounds = getattr(policy_of(config), pool)
    assert (types[pool]["min_workers"], types[pool]["max_workers"]) == (bounds.min_replicas, bounds.max_replicas)
    assert GROUPS[pool]["replicas"] == getattr(config, pool).replicas


@pytest.mark.parametrize("pod", sorted(PODS.keys() - {"kvrelay-redis"}))
def test_pods_that_drain_have_the_time_for_it(pod: str) -> None:
    workers_s = inspect.signature(Actuator).parameters["drain_timeout_s"].default
    assert PODS[pod]["spec"]["terminationGracePeriodSeconds"] > max(DRAIN_GRACE_S, workers_s)


# What the manifests say about each other


@each_container
def test_containers_are_confined(template: Manifest, container: Manifest) -> None:
    pod = template["spec"]["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]


@each_container
def test_mounts_and_config_maps_exist(template: Manifest, container: Manifest) -> None:
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    config_maps = {one["metadata"]["name"]: one["data"] for one in of_kind("ConfigMap")}
    for argument in container.get("command", []):
        if argument.startswith("/"):
            path = Path(argument)
            assert path.name in config_maps[mounts[str(path.parent)]["configMap"]["name"]]


def test_the_controller_sees_its_raylet() -> None:
    """Ray finds it among the processes, and talks to it by sockets in /tmp/ray and memory in /dev/shm."""
    spec = PODS["head"]["spec"]
    assert spec["shareProcessNamespace"] is True
    mounts = [
        {(one["mountPath"], one["name"]) for one in container["volumeMounts"]} for container in containers(PODS["head"])
    ]
    # These names are KubeRay's own: under them it adds the same volumes to the container of the autoscaler.
    assert all({("/tmp/ray", "ray-logs"), ("/dev/shm", "shared-mem")} <= one for one in mounts)


@pods
def test_only_kvrelays_own_pods_may_connect(template: Manifest) -> None:
    (policy,) = (one for one in of_kind("NetworkPolicy") if one["metadata"]["name"] == "kvrelay")
    assert policy["spec"]["podSelector"] == {}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": PART_OF}}]}]
    assert PART_OF.items() <= template["metadata"]["labels"].items()


def test_the_image_has_the_ray_that_the_cluster_names() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ray[default]=={RAY['spec']['rayVersion']}" in dockerfile
    users = {template["spec"]["securityContext"]["runAsUser"] for name, template in PODS.items() if "redis" not in name}
    assert users == {int(re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)[0])}
    copied = set(re.findall(r"^COPY (\w+) \1$", dockerfile, re.MULTILINE))
    packages = yaml.safe_load(
        re.findall(r"^include = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    )
    assert copied == {name.rstrip("*") for name in packages}
