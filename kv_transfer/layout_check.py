"""The layout check: whether the KV of a sender can be converted to that of this worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import FailedPrecondition
from kvrelay.types.kv_layout import FLOAT_DTYPES, QUANTISED, KvLayout, holds
from kvrelay.wire.transfer import KvOpen

# Tokens.
_MAX_BLOCK_SIZE = 1024


@dataclass(frozen=True, slots=True)
class LayoutCheck:
    """This worker's model and the layout of its arena."""

    layout: KvLayout
    layout_hash: str
    model_id: str
    # The model's id for a sender of protocol 0.
    sampled_model_id: str

    def layout_of(self, opening: KvOpen) -> KvLayout:
        """The layout of the sender's blocks. Raises FailedPrecondition if they cannot be converted
        to this arena's.
        """
        if opening.layout_hash == self.layout_hash:
            return self.layout
        if self.layout.windows:
            raise FailedPrecondition(
                "this worker keeps the KV of sliding windows only as long as it is needed; both "
                "workers need the same version of kvrelay, kv.dtype and kv.block_size"
            )
        model_id = self.model_id
        if not opening.protocol.version and self.sampled_model_id:
            model_id = self.sampled_model_id
        if opening.layout is None or opening.model_id != model_id:
            raise FailedPrecondition(
                f"the KV is of model {opening.model_id or 'unknown'}, and this worker has "
                f"{model_id}; both workers need the same weight shapes and KV heads"
            )
        if opening.layout != self.layout:
            check_layouts(self.layout, opening.layout)
        return opening.layout


def check_layouts(ours: KvLayout, theirs: KvLayout) -> None:
    """Raises FailedPrecondition unless blocks of either layout can be converted to the other."""
    if theirs.layers != ours.layers:
        raise FailedPrecondition(
            f"the sender's KV has {len(theirs.layers)} layers, or KV heads or head dimensions, "
            "that differ from this worker's; both workers need the same model"
        )
    if theirs.ranks < 1 or any(layer.kv_heads % theirs.ranks for layer in theirs.layers):
        raise FailedPrecondition(
            f"the sender's KV heads cannot be divided evenly among {theirs.ranks} ranks"
        )
    if theirs.windows:
        raise FailedPrecondition(
            "the sender keeps the KV of sliding windows only as long as it is needed, and this "
            "worker keeps all of it; both workers need the same configuration"
        )
    fits = 1 <= theirs.block_size <= _MAX_BLOCK_SIZE
    fits = (
        fits and theirs.dtype in (*FLOAT_DTYPES, *QUANTISED) and holds(theirs.dtype, theirs.layers)
    )
    # The order of the CPU kernels.
    if theirs.word:
        fits = fits and theirs.word in (1, 2) and theirs.block_size % 16 == 0
        fits = fits and not any(layer.k_dim % theirs.word for layer in theirs.layers)
    if not fits:
        raise FailedPrecondition(
            f"the sender's blocks of {theirs.block_size} tokens in {theirs.dtype} are not supported"
        )
