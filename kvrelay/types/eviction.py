"""Names of the ways to choose the tokens that are dropped from a sequence's KV."""

from __future__ import annotations

from typing import Literal

EvictionMethod = Literal["window", "attention", "triattention"]
