"""The release of vLLM that this build works with. Does not import vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from kvrelay.errors import ConfigError

SUPPORTED = "0.32"


def check_version() -> str:
    """Returns the version of the installed vLLM. Raises ConfigError if there is none, or if it is
    another minor release: vLLM's interfaces for schedulers, samplers and connectors change with
    each.
    """
    try:
        found = version("vllm") if find_spec("vllm") is not None else ""
    except PackageNotFoundError:
        found = ""
    wanted = f"engine: vllm needs the package vllm {SUPPORTED}"
    if not found:
        raise ConfigError(
            f"{wanted}, which is not installed; install it as docs/guides/vllm.md says, or "
            "set engine: native in both pools"
        )
    if ".".join(found.split(".")[:2]) != SUPPORTED:
        raise ConfigError(
            f"{wanted}, and {found:.40} is installed; install vllm=={SUPPORTED}.*, or set engine: "
            "native in both pools"
        )
    return found
