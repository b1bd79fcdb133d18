"""The chart, rendered by Helm's own library, makes what the overlays make; its values change what
they say they do.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.custom_resource_fields import KINDS, problems
from support.rendered_manifests import (
    FOLDER,
    Manifest,
    Rendered,
    load_all,
    missing_renderer,
    rendered,
)

from kvrelay.types.workers import POOLS

helm = pytest.importorskip(
    "helm_python", reason="there is no helm-python-sdk to render the chart with"
)
if reason := missing_renderer():
    pytest.skip(reason, allow_module_level=True)

CHART = FOLDER / "chart"
SECURE = {"secure": {"enabled": True}}
KEDA = {**SECURE, "autoscaler": "keda"}
NOT_IN_THE_CHART = ("Namespace", "PersistentVolumeClaim")  # whoever installs it brings these
ON_GPUS = {
    "cpus": 4,
    "gpus": 1,
    "resources": {
        "requests": {"cpu": "4", "memory": "24Gi"},
        "limits": {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": 1},
    },
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}
GPU = {
    **SECURE,
    "image": {"tag": "0.1.0-cuda"},
    "prefill": ON_GPUS,
    "decode": ON_GPUS,
    "model": {"path": "/models/model", "dtype": "bfloat16", "claim": "kvrelay-models"},
    "config": {"kv": {"memory": "32GiB"}},
}


def chart(values: Mapping[str, Any], namespace: str = "kvrelay") -> Rendered:
    """What `helm install` would send; the values are checked by the schema first, as there."""
    return _chart(json.dumps(values), namespace)


@functools.cache
def _chart(text: str, namespace: str) -> Rendered:
    values = json.loads(text)
    with helm.Chart.load(str(CHART)) as loaded:
        merged = loaded.merge_values(values)
        loaded.validate_schema(merged)
        files = loaded.render(values, name="kvrelay", namespace=namespace)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return Rendered([one for text in texts for one in load_all(text)])


def normal(one: Manifest) -> Manifest:
    """Without the namespace, a ConfigMap's layout, and the order of mounts and volumes, which mean
    nothing.
    """
    one = copy.deepcopy(one)
    one["metadata"].pop("namespace", None)
    for name, text in one.get("data", {}).items():
        one["data"][name] = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    if one["kind"] == "ConfigMap" and "cluster.yaml" in one["data"]:
        model = one["data"]["cluster.yaml"]["model"]
        model.setdefault("dtype", "auto")
    if one["kind"] == "Deployment":
        spec = one["spec"]["template"]["spec"]
        for holder, key in (
            (spec, "volumes"),
            *((container, "volumeMounts") for container in spec["containers"]),
        ):
            holder[key] = sorted(holder[key], key=itemgetter("name"))
    return one


def by_name(manifests: list[Manifest]) -> dict[str, Manifest]:
    found = {f"{one['kind']} {one['metadata']['name']}": normal(one) for one in manifests}
    assert len(found) == len(manifests)
    return found


VARIANTS = {"base": {}, "overlays/secure": SECURE, "overlays/keda": KEDA, "overlays/gpu": GPU}


@pytest.mark.parametrize(("variant", "values"), VARIANTS.items(), ids=VARIANTS)
def test_it_makes_what_the_overlay_makes(variant: str, values: Mapping[str, Any]) -> None:
    made = by_name(chart(values).manifests)
    applied = by_name(
        [one for one in rendered(variant).manifests if one["kind"] not in NOT_IN_THE_CHART]
    )
    assert made.keys() == applied.keys()
    for name, one in applied.items():
        assert made[name] == one, name


def test_a_difference_would_show() -> None:
    made = by_name(chart({"router": {"replicas": 3}}).manifests)
    applied = by_name(
        [one for one in rendered("base").manifests if one["kind"] not in NOT_IN_THE_CHART]
    )
    assert [name for name in applied if made[name] != applied[name]] == [
        "Deployment kvrelay-router"
    ]


def test_helm_finds_nothing_to_complain_about() -> None:
    for values in VARIANTS.values():
        found = helm.lint(str(CHART), dict(values), strict=True, namespace="kvrelay")
        assert not [
            one for one in found["messages"] if one["severity"] not in ("INFO", "info", 1)
        ], found


def test_values_change_what_they_name(tmp_path: Path) -> None:
    pool = {"minReplicas": 2, "maxReplicas": 9, "cpus": 2}
    values = {
        **KEDA,
        "image": {"name": "somewhere/kvrelay", "tag": "1", "pullPolicy": "Always"},
        "prefill": pool,
        "decode": pool,
        "keda": {"prometheus": "https://metrics:9090"},
        "redis": {"image": "redis:9"},
        "config": {"router": {"max_queue": 7}},
    }
    shown = chart(values, namespace="elsewhere")
    ours = [one for name, (_, one) in shown.containers.items() if "redis" not in name]
    assert {(one["image"], one["imagePullPolicy"]) for one in ours} == {
        ("somewhere/kvrelay:1", "Always")
    }
    assert shown.containers["kvrelay-redis/redis"][1]["image"] == "redis:9"

    config, policy = shown.config(tmp_path), shown.policy(tmp_path)
    assert config.router.max_queue == 7
    for name in POOLS:
        assert (getattr(config, name).replicas, getattr(config, name).resources.num_cpus) == (2, 2)
        bounds = policy.pool(name)
        assert bounds is not None
        assert (bounds.min_replicas, bounds.max_replicas) == (9, 9)
        assert shown.containers[f"kvrelay-{name}/ray-worker"][1]["args"][0] == "--num-cpus=2"
    for scaled in shown.of_kind("ScaledObject"):
        assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 9)
        assert {one["metadata"]["serverAddress"] for one in scaled["spec"]["triggers"]} == {
            "https://metrics:9090"
        }
    (monitor,) = shown.of_kind("ServiceMonitor")
    assert (
        monitor["spec"]["endpoints"][0]["tlsConfig"]["serverName"] == "kvrelay-router.elsewhere.svc"
    )
    in_tree = chart({**values, "autoscaler": "ray"})
    assert [(one["minReplicas"], one["maxReplicas"]) for one in in_tree.groups.values()] == [
        (2, 9)
    ] * 2
    for one in [*shown.manifests, *in_tree.manifests]:
        if one["kind"] in KINDS:
            assert problems(one) == []
        else:
            kubernetes_validate.validate(one, "1.33", strict=True)
    assert not chart({"secure": {"enabled": True, "serviceMonitor": False}}).of_kind(
        "ServiceMonitor"
    )


def test_images_by_digest() -> None:
    digest = "sha256:" + "0" * 64
    shown = chart({"image": {"digest": digest}, "redis": {"image": f"redis@{digest}"}})
    assert {one["image"] for _, one in shown.containers.values()} == {
        f"kvrelay@{digest}",
        f"redis@{digest}",
    }


@pytest.mark.parametrize("values", [{}, SECURE, KEDA])
def test_one_autoscaler_at_most_decides_about_pods(values: Mapping[str, Any]) -> None:
    shown = chart(values)
    assert shown.ray["spec"]["enableInTreeAutoscaling"] is not bool(shown.of_kind("ScaledObject"))


@pytest.mark.parametrize(
    "values",
    [
        {"autoscaler": "both"},
        {"autoscaler": ["ray", "keda"]},
        {"autoscaler": "keda"},  # Prometheus would reach no router
        {"router": {"replicas": 0}},
        {"prefil": {}},
        {"decode": {"minReplicas": "1"}},
        {"secure": {"enable": True}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: Mapping[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        chart(values)
