"""Where the source lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The packages of a cluster, from the root.
PACKAGES = ("kvrelay", "kv_transfer", "prefill_worker", "decode_worker", "router", "autoscaler")
