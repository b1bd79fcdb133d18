"""The ways to choose the tokens that are dropped from a sequence's KV."""

from __future__ import annotations

from typing import Literal

EvictionMethod = Literal["window", "attention", "triattention"]

WINDOW = 16
"""Tokens before an eviction whose queries `attention` needs. SnapKV (Li et al., 2024) takes 16 to
64.
"""

WHY_NOT_WITH_WINDOWS = (
    "the model attends to the last tokens only in some layers (a sliding window), and windows "
    "count dropped tokens; leave eviction out"
)
