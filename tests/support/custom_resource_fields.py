"""The fields of custom resources that our manifests may use, and their types, as their makers
publish them.

A small part of each schema, in our own notation: a class is the type of a value, a dictionary has
these fields, those in Required must be there, a list has items like its first, a tuple names the
values, POD is a core PodTemplateSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

POD = object()
CONTAINER_PART = dict  # resources, securityContext: validated as a part of a container
STRINGS = {str: str}


@dataclass(frozen=True)
class Required:
    kind: Any


_METADATA = {"name": Required(str), "namespace": str, "labels": STRINGS, "annotations": STRINGS}


def _resource(api_version: str, kind: str, spec: dict[Any, Any]) -> dict[Any, Any]:
    return {
        "apiVersion": Required((api_version,)),
        "kind": Required((kind,)),
        "metadata": Required(_METADATA),
        "spec": Required(spec),
    }


_GROUP = {"rayStartParams": STRINGS, "template": Required(POD)}
_SCALING = {
    "stabilizationWindowSeconds": int,
    "policies": [
        {
            "type": Required(("Pods", "Percent")),
            "value": Required(int),
            "periodSeconds": Required(int),
        }
    ],
}
_SECRET_KEY = {"name": str, "key": Required(str)}

KINDS: dict[str, dict[Any, Any]] = {
    "RayCluster": _resource(  # KubeRay 1.7
        "ray.io/v1",
        "RayCluster",
        {
            "rayVersion": str,
            "authOptions": {"mode": ("disabled", "token"), "secretName": str},
            "enableInTreeAutoscaling": bool,
            "autoscalerOptions": {
                "version": ("v1", "v2"),
                "upscalingMode": ("Default", "Aggressive", "Conservative"),
                "idleTimeoutSeconds": int,
                "resources": CONTAINER_PART,
                "securityContext": CONTAINER_PART,
                "volumeMounts": list,
            },
            "headGroupSpec": Required(_GROUP),
            "workerGroupSpecs": [
                _GROUP
                | {
                    "groupName": Required(str),
                    "replicas": int,
                    "minReplicas": Required(int),
                    "maxReplicas": Required(int),
                }
            ],
        },
    ),
    "ScaledObject": _resource(  # KEDA 2.20
        "keda.sh/v1alpha1",
        "ScaledObject",
        {
            "scaleTargetRef": Required({"name": Required(str), "kind": str, "apiVersion": str}),
            "pollingInterval": int,
            "cooldownPeriod": int,
            "minReplicaCount": int,
            "maxReplicaCount": int,
            "fallback": {
                "failureThreshold": Required(int),
                "replicas": Required(int),
                "behavior": (
                    "static",
                    "currentReplicas",
                    "currentReplicasIfHigher",
                    "currentReplicasIfLower",
                ),
            },
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {"scaleUp": _SCALING, "scaleDown": _SCALING}
                },
            },
            "triggers": Required(
                [
                    {
                        "type": Required(("prometheus",)),
                        # Of the scaler, not of the resource: what its page says.
                        "metadata": Required(
                            {
                                "serverAddress": Required(str),
                                "query": Required(str),
                                "threshold": Required(str),
                            }
                        ),
                        "metricType": ("AverageValue", "Value"),
                    }
                ]
            ),
        },
    ),
    "ServiceMonitor": _resource(  # Prometheus' operator 0.93
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        {
            "selector": Required({"matchLabels": STRINGS}),
            "endpoints": Required(
                [
                    {
                        "port": str,
                        "path": str,
                        "scheme": ("http", "https"),
                        "interval": str,
                        "authorization": {"type": str, "credentials": _SECRET_KEY},
                        "tlsConfig": {"ca": {"secret": _SECRET_KEY}, "serverName": str},
                    }
                ]
            ),
        },
    ),
}


def problems(manifest: Any) -> list[str]:
    """What does not fit the manifest's kind, each with its path."""
    return _problems(manifest, KINDS[manifest["kind"]], ())


def _problems(value: Any, kind: Any, path: tuple[str, ...]) -> list[str]:
    where = ".".join(path)
    match kind:
        case Required():
            return _problems(value, kind.kind, path)
        case dict():
            if not isinstance(value, dict):
                return [f"{where}: not a mapping"]
            needed = {name for name, inner in kind.items() if isinstance(inner, Required)}
            found = [f"{where}: {name} is missing" for name in sorted(needed - value.keys())]
            for key, inner in value.items():
                if key in kind:
                    found += _problems(inner, kind[key], (*path, key))
                elif str in kind:
                    found += _problems(inner, kind[str], (*path, key))
                else:
                    found.append(f"{where}: unknown field {key}")
            return found
        case list():
            if not isinstance(value, list):
                return [f"{where}: not a list"]
            return [one for inner in value for one in _problems(inner, kind[0], (*path, "[]"))]
        case tuple():
            return [] if value in kind else [f"{where}: {value!r} is not one of {kind}"]
        case type():
            return [] if type(value) is kind else [f"{where}: {value!r} is not a {kind.__name__}"]
    return []
