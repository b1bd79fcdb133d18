"""The adapters of a stand-in for a model that has none."""

from __future__ import annotations


class NoAdapters:
    """Stands for kvrelay.engine.model.adapter_table.AdapterTable."""

    ids: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    nbytes = 0

    def serves(self, adapter_id: str) -> bool:
        return False
