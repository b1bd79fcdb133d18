"""Settings that rank 0 sends to the processes it starts, before they load their shares."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings from which a rank loads its share of the model."""

    model_path: str
    dtype: str
    # cpu or cuda; a rank takes the GPU of its number.
    device: str
    threads: int
    block_size: int
    kv_dtype: str

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RankSettings:
        """The inverse of `to_json`."""
        return cls(**json.loads(line))
