"""Devices: their published figures, by name or as given. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvrelay.errors import InvalidArgument

# Rate of dense matrix products relative to bf16, where a data sheet names none.
_AS_BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a model runs on. Peak figures; see `Efficiency` for what is reached."""

    name: str
    full_name: str
    memory_bytes: float
    # Of the device's memory, in bytes per second.
    bandwidth: float
    # Dense operations per second, by dtype of the operands.
    flops: dict[str, float]
    # To the devices of the same host, one way, in bytes per second.
    link: float
    # To other hosts, one way, in bytes per second.
    network: float
    source: str
    is_cpu: bool = False

    def rate(self, dtype: str) -> float:
        """Returns the dense operations per second with operands of `dtype`. A dtype without a rate
        of its own is computed in bf16.
        """
        return self.flops.get(dtype, self.flops[_AS_BF16])

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain data for JSON. Bytes, bytes/s, operations/s."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peak figures that a serving engine reaches: 0 to 1. They are assumptions until
    they are measured; `kvrelay bench engine` measures them on a device.

    The defaults lie below published best cases. Pope et al., "Efficiently Scaling Transformer
    Inference" (2022), section 4, reach 76 % of the matrix rate in prefill; plain matrix products
    and copies on an H200 reach 80 % and 90 %.
    """

    compute: float = 0.6
    bandwidth: float = 0.75
    link: float = 0.8


def device_names() -> tuple[str, ...]:
    """Returns the names of the built-in devices."""
    return tuple(_table())


def find_device(name: str) -> Device:
    """Returns a built-in device. Raises InvalidArgument with the known names."""
    found = _table().get(name.lower())
    if found is None:
        raise InvalidArgument(
            f"--device {name!r:.40} is not in the table; known are {', '.join(device_names())}; "
            "describe another device with --memory, --tflops, --bandwidth and --link",
            field="device",
        )
    return found


@cache
def _table() -> dict[str, Device]:
    text = files("kvrelay.planning").joinpath("tables/devices.json").read_text(encoding="utf-8")
    return {one["name"]: _device(one) for one in json.loads(text)}


def _device(entry: dict[str, Any]) -> Device:
    return Device(
        name=entry["name"],
        full_name=entry["full_name"],
        memory_bytes=entry["memory_gb"] * 1e9,
        bandwidth=entry["bandwidth_gb_per_s"] * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in entry["tflops"].items()},
        link=entry["link_gb_per_s"] * 1e9,
        network=entry["network_gb_per_s"] * 1e9,
        source=entry["source"],
        is_cpu=entry.get("is_cpu", False),
    )
