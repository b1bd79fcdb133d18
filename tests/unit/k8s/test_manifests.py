"""Each variant of k8s/, rendered, is valid by Kubernetes' schemas and the operators', and agrees
with itself.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.custom_resource_fields import KINDS, problems
from support.rendered_manifests import (
    COMPONENT,
    FOLDER,
    PART_OF,
    VARIANTS,
    Manifest,
    missing_renderer,
    rendered,
)

if reason := missing_renderer():
    pytest.skip(reason, allow_module_level=True)

KUBERNETES = "1.33"  # of the schemas
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def distinct(manifests: Iterator[tuple[str, Manifest]]) -> list[Any]:
    """Without those that another variant has as well."""
    seen: dict[str, Any] = {}
    for name, one in manifests:
        seen.setdefault(json.dumps(one), pytest.param(one, id=name))
    return list(seen.values())


def objects() -> Iterator[tuple[str, Manifest]]:
    for variant in VARIANTS:
        for one in rendered(variant).manifests:
            yield f"{variant}-{one['kind']}-{one['metadata']['name']}", one


def templates() -> Iterator[tuple[str, Manifest]]:
    for variant in VARIANTS:
        yield from ((f"{variant}-{name}", one) for name, one in rendered(variant).pods.items())


def containers() -> Iterator[tuple[str, Manifest]]:
    for variant in VARIANTS:
        for name, (template, one) in rendered(variant).containers.items():
            yield f"{variant}-{name}", {"template": template, "container": one}


each_container = pytest.mark.parametrize("both", distinct(containers()))


# Schemas


def test_every_file_belongs_to_a_variant() -> None:
    named = set()
    for path in FOLDER.rglob("kustomization.yaml"):
        one = yaml.safe_load(path.read_text())
        names = [
            *one.get("resources", []),
            *(patch.get("path") for patch in one.get("patches", [])),
        ]
        names += [
            name for generator in one.get("configMapGenerator", []) for name in generator["files"]
        ]
        named |= {(path.parent / name).resolve() for name in names if name}
    charts = FOLDER / "chart"
    have = {
        path
        for path in FOLDER.rglob("*.yaml")
        if path.name != "kustomization.yaml" and charts not in path.parents
    }
    assert have <= named
    assert {
        str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("kustomization.yaml")
    } == {
        *VARIANTS,
        "components/secure",
        "components/keda",
        "components/kv-store",
    }


@pytest.mark.parametrize(
    "manifest", distinct((name, one) for name, one in objects() if one["kind"] not in KINDS)
)
def test_core_kinds_have_the_fields_of_their_schema(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("template", distinct(templates()))
def test_pod_templates_have_the_fields_of_a_core_pod_template(template: Manifest) -> None:
    # The metadata's and the spec's schema are those of a PodTemplateSpec.
    kubernetes_validate.validate(
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "one"},
            "template": template,
        },
        KUBERNETES,
        strict=True,
    )


@pytest.mark.parametrize(
    "manifest", distinct((name, one) for name, one in objects() if one["kind"] in KINDS)
)
def test_custom_resources_have_their_makers_fields(manifest: Manifest) -> None:
    assert problems(manifest) == []


def test_a_wrong_custom_resource_does_not_pass() -> None:
    wrong = copy.deepcopy(rendered("base").ray)
    wrong["spec"]["autoscalerOptions"]["version"] = "v3"
    wrong["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    wrong["spec"]["workerGroupSpecs"][0]["minReplica"] = wrong["spec"]["workerGroupSpecs"][0].pop(
        "minReplicas"
    )
    assert problems(wrong) == [
        "spec.autoscalerOptions.version: 'v3' is not one of ('v1', 'v2')",
        "spec.headGroupSpec.rayStartParams.num-cpus: 0 is not a str",
        "spec.workerGroupSpecs.[]: minReplicas is missing",
        "spec.workerGroupSpecs.[]: unknown field minReplica",
    ]
    (scaled, _) = copy.deepcopy(rendered("overlays/keda").of_kind("ScaledObject"))
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 2
    assert problems(scaled) == ["spec.triggers.[].metadata.threshold: 2 is not a str"]


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one != "overlays/keda"])
def test_what_kuberay_copies_into_the_autoscalers_container_fits_a_container(variant: str) -> None:
    shown = rendered(variant)
    options = shown.ray["spec"]["autoscalerOptions"]
    container = {name: options[name] for name in ("resources", "securityContext", "volumeMounts")}
    pod = {"containers": [{"name": "autoscaler", "image": "kvrelay", **container}]}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod},
        KUBERNETES,
        strict=True,
    )
    mounted = {mount["name"] for mount in options["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in shown.pods["head"]["spec"]["volumes"]}


# Confinement


@each_container
def test_containers_are_confined(both: Manifest) -> None:
    pod, container = both["template"]["spec"], both["container"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for volume in pod["volumes"]:
        assert volume.keys() - {"name"} <= {
            "emptyDir",
            "configMap",
            "secret",
            "persistentVolumeClaim",
        }
        if "emptyDir" in volume:
            assert volume["emptyDir"]["sizeLimit"], volume["name"]


@each_variant
def test_only_the_head_talks_to_the_kubernetes_api(variant: str) -> None:
    """Its autoscaler does; KubeRay gives it an account that may see and change this RayCluster."""
    talking = [
        name
        for name, one in rendered(variant).pods.items()
        if one["spec"].get("automountServiceAccountToken", 1)
    ]
    assert talking == ["head"]


@each_container
def test_rays_shared_memory_is_bounded(both: Manifest) -> None:
    volumes = {volume["name"]: volume for volume in both["template"]["spec"]["volumes"]}
    mounts = {
        mount["mountPath"]: volumes[mount["name"]] for mount in both["container"]["volumeMounts"]
    }
    if both["template"]["metadata"]["labels"][COMPONENT] in ("head", "worker"):
        assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
        assert mounts["/dev/shm"]["name"] == "shared-mem", "else KubeRay adds one of its own"


@each_variant
def test_the_controller_sees_its_raylet(variant: str) -> None:
    """Ray finds it among the processes, and talks to it by sockets in /tmp/ray and memory in
    /dev/shm.
    """
    shown = rendered(variant)
    assert shown.pods["head"]["spec"]["shareProcessNamespace"] is True
    names = [name for name in shown.containers if name.startswith("head/")]
    assert names == ["head/controller", "head/ray-head"]
    for name in names:
        mounts = {
            (one["mountPath"], one["name"]) for one in shown.containers[name][1]["volumeMounts"]
        }
        # These names are KubeRay's own: under them it adds the same volumes to the container of the
        # autoscaler.
        assert {("/tmp/ray", "ray-logs"), ("/dev/shm", "shared-mem")} <= mounts


# Agreement


@each_variant
def test_selectors_find_pods(variant: str) -> None:
    shown = rendered(variant)
    labels = {name: one["metadata"]["labels"] for name, one in shown.pods.items()}
    assert all(PART_OF.items() <= one.items() for one in labels.values())
    selectors = {
        one["metadata"]["name"]: one["spec"]["selector"] for one in shown.of_kind("Service")
    }
    for kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        selectors |= {
            f"{kind} {one['metadata']['name']}": one["spec"]["selector"]["matchLabels"]
            for one in shown.of_kind(kind)
        }
    found = {
        name: [pod for pod, have in labels.items() if wanted.items() <= have.items()]
        for name, wanted in selectors.items()
    }
    assert all(len(pods) == 1 for pods in found.values()), found


@each_variant
def test_what_pods_mount_exists_or_the_readme_says_how_to_make_it(variant: str) -> None:
    shown = rendered(variant)
    config_maps = {one["metadata"]["name"] for one in shown.of_kind("ConfigMap")}
    claims = {one["metadata"]["name"] for one in shown.of_kind("PersistentVolumeClaim")}
    readme = (FOLDER / "README.md").read_text()
    for name, template in shown.pods.items():
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "secret" in volume:
                assert f"create secret generic {volume['secret']['secretName']} " in readme, name


@each_variant
def test_one_autoscaler_at_most_decides_about_pods(variant: str) -> None:
    shown = rendered(variant)
    in_tree, keda = shown.ray["spec"]["enableInTreeAutoscaling"], shown.of_kind("ScaledObject")
    assert in_tree is not bool(keda)
    assert ("autoscalerOptions" in shown.ray["spec"]) is in_tree
    assert bool(shown.groups) is in_tree


def test_whoever_adds_keda_turns_the_in_tree_autoscaler_off() -> None:
    component = yaml.safe_load((FOLDER / "components" / "keda" / "kustomization.yaml").read_text())
    assert "scaled-object.yaml" in component["resources"]
    (patch,) = [
        yaml.safe_load(one["patch"])
        for one in component["patches"]
        if one["target"] == {"kind": "RayCluster"}
    ]
    assert {"op": "replace", "path": "/spec/enableInTreeAutoscaling", "value": False} in patch
    # And the objects that it adds come from nowhere else.
    others = [
        path
        for path in FOLDER.rglob("*.yaml")
        if path.parent.name != "keda" and FOLDER / "chart" not in path.parents
    ]
    assert not [path for path in others if "kind: ScaledObject" in path.read_text()]
