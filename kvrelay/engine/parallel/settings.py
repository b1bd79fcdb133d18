"""What rank 0 tells the processes that it starts, before they load their shares."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RankSettings:
    model_path: str
    dtype: str
    device: str  # cpu or cuda; a rank takes the GPU of its number
    threads: int
    block_size: int
    kv_dtype: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RankSettings:
        return cls(**json.loads(line))
