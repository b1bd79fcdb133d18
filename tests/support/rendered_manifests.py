"""What `kubectl apply -k` would send, by kubectl's own kustomize, and what is in it."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.config_file import load_config, load_policy
from kvrelay.config.schema import ClusterConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "k8s"
VARIANTS = (
    "base",
    "overlays/cpu-demo",
    "overlays/secure",
    "overlays/gpu",
    "overlays/keda",
    "overlays/kv-store",
)
PART_OF = {"app.kubernetes.io/part-of": "kvrelay"}
COMPONENT = "app.kubernetes.io/component"
LEAST_KUSTOMIZE = 5  # which components and their patches need

Manifest = dict[str, Any]


@functools.cache
def missing_renderer() -> str:
    """Why nothing can be rendered here, or nothing."""
    if shutil.which("kubectl") is None:
        return "there is no kubectl to render k8s/ with"
    shown = json.loads(_output("kubectl", "version", "--client", "--output", "json"))
    version = shown.get("kustomizeVersion", "v0")
    if int(version.removeprefix("v").partition(".")[0]) < LEAST_KUSTOMIZE:
        return f"kubectl has kustomize {version}; k8s/ needs v{LEAST_KUSTOMIZE}"
    return ""


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


class Rendered:
    """All objects of one variant, or of a chart."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def of_kind(self, kind: str) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] == kind]

    @property
    def ray(self) -> Manifest:
        (found,) = self.of_kind("RayCluster")
        return found

    @property
    def groups(self) -> dict[str, Manifest]:
        return {group["groupName"]: group for group in self.ray["spec"].get("workerGroupSpecs", [])}

    @property
    def pods(self) -> dict[str, Manifest]:
        """Pod templates by name; those of a RayCluster with the label that KubeRay adds."""
        found = {
            one["metadata"]["name"]: one["spec"]["template"]
            for kind in ("Deployment", "StatefulSet")
            for one in self.of_kind(kind)
        }
        found["head"] = self.ray["spec"]["headGroupSpec"]["template"]
        for name, group in self.groups.items():
            template = group["template"]
            labels = template["metadata"]["labels"] | {"ray.io/group": name}
            found[name] = {**template, "metadata": {**template["metadata"], "labels": labels}}
        return found

    @property
    def containers(self) -> dict[str, tuple[Manifest, Manifest]]:
        """Pod template and container, by pod/container."""
        return {
            f"{name}/{one['name']}": (template, one)
            for name, template in self.pods.items()
            for one in [
                *template["spec"].get("initContainers", []),
                *template["spec"]["containers"],
            ]
        }

    def config_map(self, name: str) -> dict[str, str]:
        (found,) = [
            one["data"] for one in self.of_kind("ConfigMap") if one["metadata"]["name"] == name
        ]
        return found

    def config(self, folder: Path) -> ClusterConfig:
        """As `kvrelay router -c` and `kvrelay controller -c` load it in their pods."""
        for name, text in self.config_map("kvrelay-config").items():
            (folder / name).write_text(text)
        return load_config(folder / "cluster.yaml")

    def policy(self, folder: Path) -> AutoscalingPolicy:
        config = self.config(folder)
        assert config.autoscaling == str(folder / "policy.yaml")
        return load_policy(Path(config.autoscaling))


@functools.cache
def rendered(variant: str) -> Rendered:
    return Rendered(load_all(_output("kubectl", "kustomize", str(FOLDER / variant))))


def load_all(text: str) -> list[Manifest]:
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]
