"""The fields of KubeRay's RayCluster (ray.io/v1, KubeRay 1.7) that our manifest may use, and their types.

A small part of the schema, in our own notation: a class is the type of a value, a dictionary has these fields, a list
has items like its first, and POD is a core PodTemplateSpec.
"""

from __future__ import annotations

from typing import Any

POD = object()
CONTAINER_PART = dict  # resources, securityContext: validated as a part of a container
STRINGS = {str: str}

_GROUP = {"rayStartParams": STRINGS, "template": POD}

RAY_CLUSTER: dict[Any, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": STRINGS, "annotations": STRINGS},
    "spec": {
        "rayVersion": str,
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": {
            "version": ("v1", "v2"),
            "upscalingMode": ("Default", "Aggressive", "Conservative"),
            "idleTimeoutSeconds": int,
            "resources": CONTAINER_PART,
            "securityContext": CONTAINER_PART,
            "volumeMounts": list,
        },
        "headGroupSpec": _GROUP,
        "workerGroupSpecs": [_GROUP | {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}],
    },
}
REQUIRED = {
    ("spec",): {"headGroupSpec"},
    ("spec", "headGroupSpec"): {"template", "rayStartParams"},
    ("spec", "workerGroupSpecs", "[]"): {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def problems(value: Any, kind: Any = RAY_CLUSTER, path: tuple[str, ...] = ()) -> list[str]:
    """What does not fit, each with its path."""
    where = ".".join(path)
    match kind:
        case dict():
            if not isinstance(value, dict):
                return [f"{where}: not a mapping"]
            found = [f"{where}: {name} is missing" for name in sorted(REQUIRED.get(path, set()) - value.keys())]
            for key, inner in value.items():
                if key in kind:
                    found += problems(inner, kind[key], (*path, key))
                elif str in kind:
                    found += problems(inner, kind[str], (*path, key))
                else:
                    found.append(f"{where}: unknown field {key}")
            return found
        case list():
            if not isinstance(value, list):
                return [f"{where}: not a list"]
            return [one for inner in value for one in problems(inner, kind[0], (*path, "[]"))]
        case tuple():
            return [] if value in kind else [f"{where}: {value!r} is not one of {kind}"]
        case type():
            return [] if type(value) is kind else [f"{where}: {value!r} is not a {kind.__name__}"]
    return []
