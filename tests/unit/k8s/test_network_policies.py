"""Who can connect to whom, by the policies as the Kubernetes documentation has them work."""

from __future__ import annotations

from typing import Any

import pytest
from support.rendered_manifests import VARIANTS, Manifest, Rendered, missing_renderer, rendered

if reason := missing_renderer():
    pytest.skip(reason, allow_module_level=True)

Labels = dict[str, str]
WORKERS_PORT = 40_000  # one that the kernel gives to a worker
STRANGER: Labels = {"app": "stranger"}
CLIENT: Labels = {"kvrelay-client": "true"}
PROMETHEUS: Labels = {"app.kubernetes.io/name": "prometheus"}


def selects(selector: Manifest, labels: Labels) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    listed = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in listed)
    return exact and all(labels.get(one["key"]) in one["values"] for one in listed)


def admits(rule: Manifest, source: Labels, same_namespace: bool, port: int) -> bool:
    def from_there(peer: dict[str, Any]) -> bool:
        assert peer.keys() <= {"podSelector", "namespaceSelector"}
        anywhere = peer.get("namespaceSelector")
        assert anywhere in (None, {})
        return (same_namespace or anywhere == {}) and selects(peer["podSelector"], source)

    ports = [
        range(one["port"], one.get("endPort", one["port"]) + 1) for one in rule.get("ports", [])
    ]
    return any(map(from_there, rule["from"])) and (not ports or any(port in one for one in ports))


def reaches(
    shown: Rendered, source: Labels, target: str, port: int, *, same_namespace: bool = True
) -> bool:
    chosen = policies(shown, shown.pods[target]["metadata"]["labels"], "Ingress")
    return any(
        admits(rule, source, same_namespace, port)
        for one in chosen
        for rule in one.get("ingress", [])
    )


def policies(shown: Rendered, labels: Labels, direction: str) -> list[Manifest]:
    found = [
        one["spec"]
        for one in shown.of_kind("NetworkPolicy")
        if selects(one["spec"]["podSelector"], labels)
    ]
    chosen = [one for one in found if direction in one["policyTypes"]]
    assert chosen, f"{direction} of {labels} is open to all"
    return chosen


def leaves(
    shown: Rendered,
    source: str,
    target: Labels | None,
    port: int,
    protocol: str = "TCP",
    *,
    same_namespace: bool = True,
) -> bool:
    """Whether a pod may connect to another, or, with no target, to an address that is no pod's."""
    for rule in (
        one
        for policy in policies(shown, labels_of(shown, source), "Egress")
        for one in policy.get("egress", [])
    ):
        ports = rule.get("ports", [])
        if ports and not any(
            one["port"] == port and one.get("protocol", "TCP") == protocol for one in ports
        ):
            continue
        if "to" not in rule:
            return True
        for peer in rule["to"]:
            here = same_namespace or peer.get("namespaceSelector") == {}
            if target is not None and here and selects(peer["podSelector"], target):
                return True
    return False


def labels_of(shown: Rendered, name: str) -> Labels:
    labels: Labels = shown.pods[name]["metadata"]["labels"]
    return labels


def rays_ports(shown: Rendered) -> set[int]:
    """All that a Ray node listens on; those that are not in the manifests are Ray's defaults."""
    params = shown.ray["spec"]["headGroupSpec"]["rayStartParams"]
    fixed = {int(value) for name, value in params.items() if name.endswith("-port")}
    return {
        6379,
        8080,
        8265,
        10001,
        *fixed,
        *range(int(params["min-worker-port"]), int(params["max-worker-port"]) + 1),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_workers_are_reached_by_routers_and_each_other_and_ray_by_its_own_nodes(
    variant: str,
) -> None:
    shown = rendered(variant)
    labels = {name: one["metadata"]["labels"] for name, one in shown.pods.items()}
    prefill, decode = (
        next(name for name in shown.pods if name.endswith(pool)) for pool in ("prefill", "decode")
    )
    ray = rays_ports(shown)
    for worker in (prefill, decode):
        for source in ("head", prefill, decode, "kvrelay-router"):
            assert reaches(shown, labels[source], worker, WORKERS_PORT), source
        assert not any(reaches(shown, labels["kvrelay-router"], worker, port) for port in ray)
        assert all(reaches(shown, labels["head"], worker, port) for port in (6380, 10002))
        assert reaches(shown, labels[worker], "head", 6379)
    for source, same_namespace in (
        (STRANGER, True),
        (CLIENT, True),
        (PROMETHEUS, False),
        (STRANGER, False),
    ):
        for target in ("head", prefill, decode, "kvrelay-redis"):
            for port in (6379, 8265, 10002, WORKERS_PORT):
                assert not reaches(shown, source, target, port, same_namespace=same_namespace), (
                    source,
                    target,
                    port,
                )
    assert not any(reaches(shown, labels["kvrelay-router"], "head", port) for port in ray)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_that_leaks_has_anywhere_to_go(variant: str) -> None:
    shown = rendered(variant)
    dns = {"k8s-app": "kube-dns"}
    for source in shown.pods:
        own = source not in ("kvrelay-redis", "kvrelay-kv-store")
        for target in shown.pods:
            assert leaves(shown, source, labels_of(shown, target), WORKERS_PORT) is own, (
                source,
                target,
            )
        assert leaves(shown, source, dns, 53, "UDP", same_namespace=False) is own
        for port in (80, 443, 6443, 8443, 25):
            api = source == "head" and port in (443, 6443)
            assert leaves(shown, source, None, port) is api, (source, port)
            assert leaves(shown, source, STRANGER, port) is api
            assert leaves(shown, source, PROMETHEUS, port, same_namespace=False) is api


@pytest.mark.parametrize("variant", VARIANTS)
def test_redis_refuses_writes_before_the_kernel_ends_it(variant: str) -> None:
    container = rendered(variant).pods["kvrelay-redis"]["spec"]["containers"][0]
    command = container["command"]
    most = int(command[command.index("--maxmemory") + 1].removesuffix("mb"))
    assert 0 < most < int(container["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


@pytest.mark.parametrize("variant", VARIANTS)
def test_redis_is_for_kvrelays_own(variant: str) -> None:
    shown = rendered(variant)
    for name, one in shown.pods.items():
        assert reaches(shown, one["metadata"]["labels"], "kvrelay-redis", 6379) is (
            name not in ("kvrelay-redis", "kvrelay-kv-store")
        )
        assert not reaches(
            shown, one["metadata"]["labels"], "kvrelay-redis", 6379, same_namespace=False
        )


def test_stores_are_for_workers() -> None:
    shown = rendered("overlays/kv-store")
    for name, one in shown.pods.items():
        labels = one["metadata"]["labels"]
        assert reaches(shown, labels, "kvrelay-kv-store", 50061) is (name in ("prefill", "decode"))
        assert not reaches(shown, labels, "kvrelay-kv-store", 50061, same_namespace=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_routers_are_open_to_clients_only_where_they_ask_for_tokens(variant: str) -> None:
    shown = rendered(variant)
    endpoints = variant not in ("base", "overlays/cpu-demo")
    for port in (50051, 8000):
        assert reaches(shown, CLIENT, "kvrelay-router", port, same_namespace=False) is endpoints
        assert not reaches(shown, STRANGER, "kvrelay-router", port)
    assert reaches(shown, PROMETHEUS, "kvrelay-router", 8000, same_namespace=False) is endpoints
    assert not reaches(shown, PROMETHEUS, "kvrelay-router", 50051)
    assert not reaches(shown, CLIENT, "kvrelay-router", 50052), "operators come by port-forward"


@pytest.mark.parametrize("variant", VARIANTS)
def test_rays_ports_are_fixed_and_below_those_of_workers(variant: str) -> None:
    """Otherwise a policy could not tell them apart: a kernel's own range is 32768 to 60999."""
    shown = rendered(variant)
    params = [
        shown.ray["spec"]["headGroupSpec"]["rayStartParams"],
        *(one["rayStartParams"] for one in shown.groups.values()),
    ]
    ports = [
        {name: value for name, value in one.items() if name.endswith("-port")} for one in params
    ]
    for name in ("kvrelay-prefill", "kvrelay-decode"):
        if name in shown.pods:
            flags = [
                flag.removeprefix("--").split("=", 1)
                for flag in shown.pods[name]["spec"]["containers"][0]["args"]
            ]
            ports.append({name: value for name, value in flags if name.endswith("-port")})
    assert len(ports) == 3
    assert all(one == ports[0] for one in ports)
    assert len(ports[0]) == 7
    assert max(rays_ports(shown)) < 32768
