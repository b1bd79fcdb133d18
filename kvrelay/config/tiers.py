"""The tiers behind the KV cache's memory."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from kvrelay.config.section import BadValue, Memory, Section


class TierConfig(Section):
    """A tier keeps KV blocks that the KV cache has evicted. Sizes are of one worker."""

    # host: memory of the worker's process, for workers on GPUs. disk: files.
    kind: Literal["host", "disk"]
    # Bytes of one worker.
    size: Memory
    # The folder of a disk tier. Workers of one host share it.
    path: str = ""

    @model_validator(mode="after")
    def _path_fits(self) -> TierConfig:
        if self.kind == "disk" and not self.path:
            raise ValueError("a disk tier needs a path; set path to a folder on a local disk")
        if self.kind == "host" and self.path:
            raise ValueError(
                f"path {self.path!r} is set for a tier of kind host, which has no files; set kind: "
                "disk, or leave path out"
            )
        return self


def check_tiers(tiers: tuple[TierConfig, ...]) -> None:
    """Raises BadValue for tiers that cannot be combined."""
    kinds = [one.kind for one in tiers]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            raise BadValue(
                f"there are two tiers of kind {kind}; allowed is one of each: host, disk",
                ("tiers", index, "kind"),
            )
    if kinds == ["disk", "host"]:
        raise BadValue(
            "the tier of kind host comes after disk; list tiers from the nearest to the farthest: "
            "host, then disk",
            ("tiers", 1, "kind"),
        )
