"""Which workers a router can give work to at all. Pure."""

from __future__ import annotations

from kvrelay.protocol import ours
from kvrelay.types import WorkerInfo


def misfit(info: WorkerInfo, vocab_size: int = 0, tokenizer_id: str = "") -> str:
    """Why a router whose model has that vocabulary and tokenizer does not work with the worker;
    empty if it does.

    Two clusters on one Redis, or a router that was started before its model's files were replaced:
    token ids of one tokenizer are nonsense to a model with another. What either of the two does not
    say is not compared.
    """
    if reason := ours().refuses(info.protocol):
        return reason
    if vocab_size and info.vocab_size and info.vocab_size != vocab_size:
        return (
            f"its model has a vocabulary of {info.vocab_size} tokens, this router's has "
            f"{vocab_size}; start a router with the worker's model, or give each cluster a Redis "
            "of its own"
        )
    if tokenizer_id and info.tokenizer_id and info.tokenizer_id != tokenizer_id:
        return (
            f"its model has tokenizer {info.tokenizer_id[:8]}, this router's has "
            f"{tokenizer_id[:8]}; start a router with the worker's model, or give each cluster a "
            "Redis of its own"
        )
    return ""
